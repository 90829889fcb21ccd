"""The order of dimensions in memory: channels last, transposed operands, attention's results."""
