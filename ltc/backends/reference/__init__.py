"""Formulas of the reference backend that are longer than a row of `eager`.

movement_ops     views, joins, lookups      window_ops  convolutions and pooling
reduction_calls  over the dimensions named  attention   with its gradient
philox           random bits                torch_call  extern nodes: PyTorch's own kernels
donation         outputs in the memory of inputs
own_memory       values in their own        value_checks  what raises by its values
"""
