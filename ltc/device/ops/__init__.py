"""Kernels that no schema describes: copies, pickling, storages, resizing, attention."""
