"""The device side of a training loop: steps are marked, closures run, batches are copied.

steps, closures                marks, and functions that run after them
transfer, nested_copy          batches to devices; their containers opened and made again
batch_source, loader_options   the source of batches, and the options of their loader
"""
