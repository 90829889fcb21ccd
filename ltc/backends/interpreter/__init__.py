"""Recorded calls run at once, one by one, on PyTorch's own CPU kernels: no graph, no compiler.

call_kernel.py makes one call a function of CPU tensors, stride_rules.py says which kernels read
operands as they lie, interpreted.py runs the calls of a recording in order, straight_line.py makes
one function of those that have run a few times, any_size.py runs those of a path whose sizes are symbols.
"""
