"""Who runs graphs: the contract for vendors (`interface`), the reference (`eager`), the LLVM backend."""
