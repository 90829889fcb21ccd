"""The one caller of PyTorch's CPU kernels, and what has to be known of a kernel before it is called.

Immediate calls, side exits, calls that cannot be recorded, extern nodes and probes of types differ in
where their tensors are.  How a kernel is called is the same for all of them, and said here.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ltc.aten.call import in_order
from ltc.aten.wide_sums import cpu_function_of, in_wide_sums
from ltc.backends.plain_dispatch import PlainDispatch, is_plain_now
from ltc.errors import OutOfRangeIndexError
from ltc.support.torch_private import (
    bound_function,
    has_kernel,
    schema_of_overload,
    storage_identity,
    storage_use_count,
)

CPU = torch.device("cpu")
ALONE = 2  # a storage's users: its one tensor, and the Python object that asks
# What a kernel raises that does not take its operands, or finds values that it does not take.
REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError)
_NO_TENSORS: frozenset[int] = frozenset()
_random_state = threading.Lock()  # held while the process's default generator is borrowed
_aten = torch.ops.aten


class KernelCall:
    """A way to call the CPU kernel of one overload.

    - The calling thread's modes change nothing: autocast, inference mode, a default device.
    - Operands are contiguous, unless the kernel reads any strides as well: `laid`.
    - A device is the CPU.
    - The kernel may write to what it is given to write to: `owned`.
    - Sums of 16-bit numbers are made in 32 bits.
    - Memory without values holds zeros.
    - Random numbers follow from a seed, and the process's generator is left as it was.
    - Results are flat, in the order of `Call.results`; none is a tensor that was an operand: `settled`.

    Attributes:
        function: The callable that runs the overload on CPU tensors.
        any_strides: True if the kernel takes operands with any strides.
        may_return_operand: True if a tensor it returns may be one that it was given.
        leaves_undefined: True if the kernel leaves memory as it is, or asks what lies behind its operand.
        writes_lists: True if it writes to lists of tensors.
        names: The names of its keyword arguments, in schema order.
        positional: The number of its other arguments.
    """

    def __init__(self, overload: Any) -> None:
        self.overload, self.name = overload, overload.name()
        arguments = schema_of_overload(overload).arguments
        self.names = [a.name for a in arguments if a.kwarg_only]
        self.positional = len(arguments) - len(self.names)
        self._all_names = [a.name for a in arguments]
        self.writes_lists = any(
            a.alias_info is not None and a.alias_info.is_write and "List" in str(a.type)
            for a in arguments
        )
        self.has_zeros = self.name in _ZEROS
        self.function = cpu_function_of(_ZEROS.get(self.name, overload))
        self._looks_first = _LOOKS_FIRST.get(self.name) or self.function
        self.any_strides = takes_any_strides(self.name)
        self.may_return_operand = self.name != "aten::linear" and bool(
            has_kernel(self.name, "CompositeImplicitAutograd")
        )
        self.leaves_undefined = not self.has_zeros and self.name.partition("::")[2].startswith(
            ("empty", "new_empty", "as_strided", "resize", "set_")
        )

    @functools.cached_property
    def quick(self) -> Callable[..., Any]:
        """The same as `function`, or torch's Python function that comes to it in less time.

        That may refuse what the overload takes, so it is called where a second try is harmless.
        """
        if self.has_zeros or self.writes_lists or "device" in self.names:
            return self.function
        return quick_function(self.name, self.overload) or self.function

    # --- operands

    def laid(self, argument: Any) -> Any:
        """Return an argument, or a list of them, as the kernel takes it."""
        kind = argument.__class__
        if kind is torch.Tensor:
            return argument if self.any_strides else contiguous(argument)
        if kind is list or kind is tuple:
            return [self.laid(part) for part in argument]
        return CPU if kind is torch.device else argument

    def by_name(self, values: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments, of all in schema order."""
        return values[: self.positional], dict(zip(self.names, values[self.positional :]))

    # --- the call

    def __call__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int | None = None
    ) -> Any:
        """Return what the kernel returns.

        Args:
            args, kwargs: CPU tensors, and the overload's other arguments.
            seed: The seed of its random numbers; None if it draws none.
        """
        if not is_plain_now():
            with PlainDispatch():
                return self._called(args, kwargs, seed)
        return self._called(args, kwargs, seed)

    def _called(self, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int | None) -> Any:
        # the forward of a gradient with an unused result has not run, and has checked nothing
        function = self._looks_first
        if seed is None:
            return function(*args, **kwargs)
        if "generator" in self._all_names:
            place, generator = self._all_names.index("generator"), torch.Generator(CPU)
            generator.manual_seed(seed)
            args = [generator if i == place else one for i, one in enumerate(args)]
            return function(
                *args, **(kwargs if place < len(args) else {**kwargs, "generator": generator})
            )
        default = torch.default_generator
        with _random_state:
            before = default.get_state()
            try:
                default.manual_seed(seed)
                return function(*args, **kwargs)
            finally:
                default.set_state(before)

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mutated: Sequence[int | str] = (),
        returned: bool = True,
        writable: Collection[int] = _NO_TENSORS,
        seed: int | None = None,
    ) -> list[Any]:
        """Return the results of a call, in the order of `Call.results`; its operands are left as they are.

        Args:
            args, kwargs: CPU tensors in place of values, and the other arguments.
            mutated: The positions and names of the arguments that the kernel writes to.
            returned: True if it returns tensors that are not these.
            writable: The ids of operands that are not read afterwards: they may be written over.
            seed: The seed of its random numbers; None if it draws none.
        """
        given: Any = [self.laid(one) for one in args]
        named: Any = {name: self.laid(one) for name, one in kwargs.items()}
        for place in mutated:
            holder = given if isinstance(place, int) else named
            holder[place] = owned(holder[place], writable)
        return in_order(given, named, mutated, returned, self(given, named, seed))

    def may_have_written(self, error: Exception) -> bool:
        """Return True if the call that raised the error may have left operands half written.

        Each tensor of a list is written to before the next is looked at.
        """
        return self.writes_lists or not isinstance(error, NotImplementedError)

    def settled(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a result of the recorded dtype that is no operand: else one tensor stands for two."""
        if tensor.dtype is not dtype:
            tensor = tensor.to(dtype)
        if dtype.is_complex:
            tensor = tensor.resolve_conj()
        return _aten.alias(tensor) if self.may_return_operand else tensor


@functools.cache
def kernel_call(overload: Any) -> KernelCall:
    """Return how the overload's kernel is called."""
    return KernelCall(overload)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def owned(argument: Any, writable: Collection[int] = _NO_TENSORS) -> Any:
    """Return what a kernel may write to, with the value of the argument: a tensor, a list of them, None.

    Args:
        writable: The ids of tensors that may be written over, where nothing else is in their memory.
    """
    if isinstance(argument, (list, tuple)):
        return [owned(part, writable) for part in argument]
    if not isinstance(argument, torch.Tensor):
        return argument
    if id(argument) in writable and argument.is_contiguous() and is_alone(argument):
        return argument
    return argument.clone(memory_format=torch.contiguous_format)


def is_alone(tensor: torch.Tensor) -> bool:
    """Return True if no other tensor is in the same memory."""
    return bool(storage_use_count(storage_identity(tensor.untyped_storage())) == ALONE)


# --- what is known of overloads by their names ---------------------------------------------------

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
_OWN_FORMULAS = frozenset({"ltc::attention", "ltc::attention_gradient"})  # they see to strides
_TAKES_ANY_STRIDES = _ELEMENTWISE | _MOVEMENTS | _SUMS_AND_PRODUCTS | _OWN_FORMULAS
# An update of parameters ends a step: it is elementwise, and nothing in it depends on the data.
_OPTIMIZERS = frozenset(
    {"_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad", "ltc::adam_"}
)


def takes_any_strides(name: str) -> bool:
    """Return True if the kernel of that overload ("aten::add.Tensor") needs no contiguous operands.

    Values appear contiguous, whatever views made them, and some kernels rely on it.  The kernels that
    are named here read every stride as well and as quickly.
    """
    return _base(name) in _TAKES_ANY_STRIDES


def takes_memory_as_it_lies(name: str) -> bool:
    """Return True if the kernel goes through the memory of all operands alike, whatever their strides."""
    return _base(name) in _OPTIMIZERS


@functools.cache
def cannot_fail(name: str) -> bool:
    """Return True if the call gives a result whatever is in its operands, short of memory."""
    base = _base(name)
    if base.startswith("_foreach_"):
        base = base.removeprefix("_foreach_")
    return base in _ELEMENTWISE or base in _MOVEMENTS or base in _OPTIMIZERS


def _base(name: str) -> str:
    """ "add" for "aten::add_.Tensor"; of other namespaces a name that is on no list."""
    namespace, _, rest = name.partition("::")
    base = rest.partition(".")[0]
    return base.removesuffix("_") if namespace == "aten" else name


_ZEROS = {
    "aten::empty_like": _aten.zeros_like.default,
    "aten::new_empty": _aten.new_zeros.default,
}

# Overloads that torch's functions tell apart by what they are given: tensors or numbers, one
# argument more or less; those of numbers alone, for TorchScript, of `out=`, and of named dimensions
# (`names_dim`, until torch 2.12).
_TOLD_APART = frozenset(
    """
    default Tensor Scalar Tensor_Tensor Tensor_Scalar Scalar_Tensor other self ScalarOther ScalarSelf
    dim dims dim_int dim_IntList dtype Tensor_mode Scalar_mode
""".split()
)
_NEVER_MEANT = re.compile(
    r"((int|float|complex|bool|str|enum|device|t|to|left|right|list|Scalar)_?)+|.*([oO]ut|imname|names).*|dim_(max|min)"
)
# a number before a number is an `alpha` to these, of old, with a warning
_TAKEN_FOR_OTHERS = frozenset({"aten::add.Scalar", "aten::sub.Scalar"})


def quick_function(name: str, overload: Any) -> Callable[..., Any] | None:
    """Return torch's Python function, if it comes to no other overload than this one; else None.

    It takes its arguments in half the time, and is to be given all that are positional. Of a number
    `add.Scalar` and its like make a tensor first, as their kernels do.

    Args:
        name: The overload's name: "aten::add.Scalar".
    """
    base, _, variant = name.removeprefix("aten::").partition(".")
    if name in _TAKEN_FOR_OTHERS or name in _LOOKS_FIRST or not name.startswith("aten::"):
        return None
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return None
    known = set(overload.overloadpacket.overloads()) - {variant or "default"}
    others = {one for one in known if one in _TOLD_APART or not _NEVER_MEANT.fullmatch(one)}
    if others and not {variant or "default", *others} <= _TOLD_APART:
        return None
    quick = bound_function(base)
    return None if quick is None else in_wide_sums(overload, quick)


# --- gradients whose kernels trust that their forward has looked at the values -------------------


def _bce_gradient(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    _aten.binary_cross_entropy(x, target)
    made: torch.Tensor = _aten.binary_cross_entropy_backward(grad, x, target, *rest, **named)
    return made


def _embedding_gradient(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, *rest: Any, **named: Any
) -> torch.Tensor:
    if indices.numel():
        low, high = torch.aminmax(indices)
        if low < 0 or high >= num_weights:
            raise OutOfRangeIndexError("index out of range in self")
    kernel = cpu_function_of(_aten.embedding_dense_backward.default)
    made: torch.Tensor = kernel(grad, indices, num_weights, *rest, **named)
    return made


_LOOKS_FIRST: dict[str, Callable[..., Any]] = {
    "aten::binary_cross_entropy_backward": _bce_gradient,
    "aten::embedding_dense_backward": _embedding_gradient,
}
