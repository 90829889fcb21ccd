"""Who runs graphs: the contract for vendors (`interface`), the reference (`eager`), the LLVM backend.

And who runs what is not a graph yet: `interpreter/`, recorded calls on PyTorch's own kernels.
"""
