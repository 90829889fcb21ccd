"""From aten calls to graphs: the registry, and one file of rules for each family of overloads."""

from ltc.aten import (  # noqa: F401  importing a file registers its rules
    activation,
    attention,
    collective,
    convolution,
    creation,
    embedding_bag,
    foreach,
    indexing,
    logic,
    loss,
    matmul,
    movement,
    normalization,
    optimizer,
    pointwise,
    pooling,
    reduction,
    rng,
    strided,
)
