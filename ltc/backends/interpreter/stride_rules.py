"""Which of PyTorch's CPU kernels take operands with any strides, and which calls cannot fail.

Values of a recording are contiguous, whatever views made them: that is what programs are told, and
what some kernels rely on.  So an operand is made contiguous, but for the kernels named here, which
read every stride as well and as quickly.
"""

from __future__ import annotations

import functools

# Elementwise, in every form: in place, with out=, over lists.
_ELEMENTWISE = frozenset(
    """
    abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max
    clamp_min copy cos div eq erf erfc exp expm1 fill floor ge gelu gelu_backward gt hardtanh
    hardtanh_backward isnan le leaky_relu leaky_relu_backward lerp log log1p logical_and logical_not
    logical_or lt masked_fill maximum minimum mul ne neg pow reciprocal relu remainder round rsqrt
    rsub sigmoid sigmoid_backward sign silu silu_backward sin softplus sqrt square sub tanh
    tanh_backward threshold threshold_backward trunc where zero
    """.split()
)
_MOVEMENTS = frozenset(
    """
    alias cat clone detach diagonal expand expand_copy flip narrow permute permute_copy repeat
    select slice split split_with_sizes squeeze stack t t_copy transpose transpose_copy unbind
    unsqueeze _to_copy
    """.split()
)
_SUMS_AND_PRODUCTS = frozenset(
    "addmm all amax amin any baddbmm bmm linear linear_backward mean mm sum".split()
)
_TAKES_ANY_STRIDES = _ELEMENTWISE | _MOVEMENTS | _SUMS_AND_PRODUCTS
# An update of parameters ends a step: it is elementwise, and nothing in it depends on the data.
_OPTIMIZERS = frozenset(
    {"_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad", "ltc::adam_"}
)


@functools.cache
def takes_any_strides(name: str) -> bool:
    """Whether the kernel of that overload ("aten::add.Tensor") needs no contiguous operands."""
    return _base(name) in _TAKES_ANY_STRIDES


@functools.cache
def cannot_fail(name: str) -> bool:
    """Whether the call gives a result whatever is in its operands, short of memory."""
    base = _base(name)
    if base.startswith("_foreach_"):
        base = base.removeprefix("_foreach_")
    return base in _ELEMENTWISE or base in _MOVEMENTS or base in _OPTIMIZERS


def _base(name: str) -> str:
    """ "add" for "aten::add_.Tensor"; of other namespaces a name that is on no list."""
    namespace, _, rest = name.partition("::")
    base = rest.partition(".")[0]
    return base.removesuffix("_") if namespace == "aten" else name
