"""Formulas of the reference backend that are longer than a row of `eager`.

row_formulas  views, joins, lookups, convolutions and pooling
attention     with its gradient          philox      random bits
torch_call    extern nodes: PyTorch's own kernels
donation      outputs in the memory of inputs
own_memory    values in their own
"""
