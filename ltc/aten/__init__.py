"""From aten calls to graphs: the registry, and one file of rules for each family of overloads.

schema, call, promote   an overload's arguments, one recorded call, torch's type promotion
unnamed_dtype           which calls depend on torch's default dtype, and which that was
registry, expansion     which rule traces which overload; calls become a graph
result_shapes           the shapes of a call's results by its rule, also as expressions of symbols
stated_shapes           the same of overloads that have no rule
extern                  a call that has no rule
rules, nn               the formulas: general families, and layers of networks
"""

from ltc.aten.nn import (  # noqa: F401  importing a file registers its rules
    activation,
    attention,
    convolution,
    embedding_bag,
    loss,
    normalization,
    optimizer,
    padding,
    pooling,
    quantization,
    recurrent,
    resampling,
    upsampling,
)
from ltc.aten.rules import (  # noqa: F401
    collective,
    creation,
    foreach,
    indexing,
    matmul,
    movement,
    pointwise,
    reduction,
    rng,
)
