"""Text to machine code: llvmlite's binding, and the loader of objects that need no LLVM."""
