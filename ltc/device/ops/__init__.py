"""Kernels that no schema describes: copies, pickling, resizing, attention."""
