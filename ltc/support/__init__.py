"""Leaves that know nothing of tensors on devices: locks, files, channels, nested data, counters."""
