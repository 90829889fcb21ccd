"""Formulas for the types of results, one file for each family of overloads.

table, operands                  which formula is whose; what they ask of operands
elementwise, special, movement, reduction, indexing, creation     general families
product, image, layer, attention, recurrence, list  layers of networks and their gradients; optimizers
linalg                                       factors of matrices, determinants, distances
quantization                                 rounding to integers' steps in training
"""

from ltc.device.shapes.formulas import (  # noqa: F401  importing a file registers its formulas
    attention_types,
    creation_types,
    elementwise_types,
    image_types,
    indexing_types,
    layer_types,
    linalg_types,
    list_types,
    movement_types,
    product_types,
    quantization_types,
    recurrence_types,
    reduction_types,
    special_types,
)
