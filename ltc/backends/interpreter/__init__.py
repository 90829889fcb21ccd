"""Recorded calls run at once, one by one, on PyTorch's own CPU kernels: no graph, no compiler.

call_kernel.py makes one call a function of CPU tensors, torch_functions.py says which of torch's
functions takes its place, stride_rules.py which kernels read operands as they lie, interpreted.py
runs the calls of a recording in order, straight_line.py makes one function of those that have run a
few times, any_size.py runs those of a path whose sizes are symbols, expanded_call.py those that draw;
large_values.py says what is not run so.
"""
