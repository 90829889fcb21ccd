"""Tracing rules of general operations: arithmetic, movement, indexing, reductions, random numbers."""
