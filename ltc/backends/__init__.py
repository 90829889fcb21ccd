"""Runners of graphs: the contract for vendors (`interface`), the reference (`eager`), the LLVM
backend.

Recorded calls that are no graph yet run on PyTorch's own kernels: `interpreter/`.
"""
