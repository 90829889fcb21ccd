"""The result types of a call, found without running it: dtype and shape.

PyTorch is asked, since it alone knows which calls it takes: the CPU's own kernel on stand-in values
where these are few (cpu_probe.py), else torch's Meta kernel. The first call of a Meta kernel that
is written in Python imports what takes a second. Some Meta kernels answer for one kind of device,
and take a meta tensor for CUDA's. Where a call that will run PyTorch's CPU kernel may be of these,
they are asked with fake CPU tensors, so that the answer is that kernel's. What they tell wrong even
so is corrected (`as_on_cpu`).

For sizes that are expressions no kernel can be asked: the rules give them (aten/result_shapes.py).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Scalar, in_order
from ltc.aten.nn.embedding_bag import noted_shapes
from ltc.aten.registry import rule_of
from ltc.aten.result_shapes import is_told, result_shapes
from ltc.backends.kernel_call import CPU
from ltc.device.shapes import cpu_probe
from ltc.errors import Unsupported
from ltc.support.bounded_table import BoundedTable
from ltc.support.observation import metrics
from ltc.support.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    fake_tensor_log,
    has_kernel,
    schema_of_overload,
)

Types = tuple  # ((shape, dtype) or None, …)


class NoTypes(Exception):
    """Meta inference cannot tell; `__cause__` is why. The call has to run to be known."""


_DEPENDS_ON_DATA = (
    NotImplementedError,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
_META = torch.device("meta")
# Of those that run PyTorch's CPU kernels, what gives or takes other types on the CPU than elsewhere.
_DEPENDS_ON_DEVICE = frozenset(
    {
        torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default,
        torch.ops.aten.histc.default,
    }
)  # fmt: skip
# Of which torch's Meta kernel knows another device's dtypes alone.
_META_REFUSES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_grouped_mm",)
    if hasattr(torch.ops.aten, name)
)
_TAKE_META = (
    "Meta", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)  # fmt: skip
_OF_DATA = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
_WRONG_CALL = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
_WRONG_FORMULA = ArithmeticError  # torch's divide by the number of elements, which may be 0
_MAY_BE_TOLD = frozenset({"aten::repeat_interleave.Tensor"})  # how many there are is an argument
_MASKS = frozenset({torch.bool, torch.uint8})  # as indices
_known: BoundedTable[tuple, Types] = BoundedTable("ResultTypes", 16_384)
# Kinds of calls whose types nobody tells, with the reason.
_unknowable: BoundedTable[tuple, str] = BoundedTable("UnknowableTypes", 4096)
_without_kernel: set[Any] = set()  # torch's own overloads that have none to be asked


def result_types(call: Call) -> Types:
    """Return the types of a call's results.

    Args:
        call: A call of an overload of torch's. It has no results yet.

    Returns:
        (shape, dtype) of every result in the order of `Call.results`; None for an undefined tensor.

    Raises:
        NoTypes: The shape depends on data, no kernel can be asked, or PyTorch rejects the call: then
        the CPU kernel has to raise the error, in its own words.
    """
    overload, args = call.overload, call.args
    if overload in _without_kernel:  # however many kinds of calls there are of it
        raise NoTypes(f"{overload} has no Meta kernel")
    if overload is torch.ops.aten.index.Tensor:
        if has_mask(args[1]):
            raise NoTypes("the number of elements that a mask selects depends on data")
        if _reads_of_nothing(args[0].shape, args[1]):
            raise NoTypes("a dimension of size 0 has no elements to index")
    if call.name in OVERLOADS and may_be_taken(*args, **call.kwargs):
        return ((args[0].shape, args[0].dtype),)
    key = _key(call)
    try:
        types = _known.get(key)
    except TypeError:  # an argument that does not hash
        return _infer(call)
    if types is not None:
        return types
    asked = (key, *cpu_probe.numbers([*args, *call.kwargs.values()]))  # one may be refused
    if asked in _unknowable:
        raise NoTypes(_unknowable[asked])
    try:
        return _known.keep(key, _infer(call))
    except NoTypes as error:
        _unknowable.keep(asked, str(error))  # no values are asked for: the answer is the same
        raise


def has_mask(indices: Sequence[Any]) -> bool:
    """Return True if one of these tensors selects by its values, which then decide how many there
    are.

    Asked here, since to say so torch's Meta kernel imports what takes half a second.
    """
    return any([x is not None and x.dtype in _MASKS for x in indices])


def _reads_of_nothing(shape: Sequence[int], indices: Sequence[Any]) -> bool:
    """Return True if indices ask for elements of an empty dimension: the Meta kernel does not look."""
    named = [(n, index) for n, index in zip(shape, indices) if index is not None]
    return any(n == 0 for n, _ in named) and not any(0 in index.shape for _, index in named)


def _key(call: Call) -> tuple:
    """Return all that the types of the results depend on, in one tuple: Python's collector counts those."""
    parts = [call.overload, torch.get_default_dtype()]
    _add_key(parts, call.args)
    for name, value in call.kwargs.items():
        parts.append(name)
        _add_key(parts, (value,))
    return tuple(parts)


def _add_key(parts: list, arguments: Iterable[Any]) -> None:
    for argument in arguments:
        kind = argument.__class__
        parts.append(kind)  # 1, 1.0 and True are equal but not the same argument
        if kind is CallResult:
            parts += argument.shape, argument.dtype
        elif kind is Scalar:
            parts += argument.dtype, argument.wrapped, argument.sample.__class__
        elif kind is list or kind is tuple:
            parts.append(len(argument))
            _add_key(parts, argument)
        else:
            parts.append(argument)


def _infer(call: Call) -> Types:
    overload = call.overload
    if rule_of(call.name) is None and _counts_data(overload):
        raise NoTypes("the shape of its result depends on data")
    metrics.count("MetaInference")
    known = [*call.args, *call.kwargs.values()]
    if _runs_its_kernel(overload) and cpu_probe.makes_little(known):
        return _by_probe(call) or _by_meta(call)
    if _is_unknown_to_meta(overload):
        return _by_rule(call)
    types = _by_meta(call)
    if overload.namespace == "ltc" or not cpu_probe.is_small(known, types):
        return types
    return _by_probe(call) or types


@functools.cache
def _runs_its_kernel(overload: Any) -> bool:
    """Return True if the CPU's kernel may run on stand-in values, before or in place of Meta's.

    An overload without stated types may depend on data, though no tag says so: stand-in values
    would decide it.
    """
    if overload.namespace != "aten" or is_told(overload.name()):
        return overload.namespace == "aten"
    return _OF_DATA.isdisjoint(overload.tags) and _has_meta_kernel(overload)


@functools.cache
def _is_unknown_to_meta(overload: Any) -> bool:
    if overload.namespace != "aten" or not is_told(overload.name()):
        return False
    if _draws_for_operand(overload):
        return True  # torch's Meta kernels of these import what takes a second
    return overload in _META_REFUSES or not _has_meta_kernel(overload)


def _draws_for_operand(overload: Any) -> bool:
    """True if it draws as many numbers as its first operand has elements."""
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    arguments = schema_of_overload(overload).arguments
    is_for_operand = bool(arguments) and str(arguments[0].type) == "Tensor"
    return is_for_operand and not overload.name().startswith("aten::multinomial")


def _by_meta(call: Call) -> Types:
    overload = call.overload
    try:
        found = _asked(call)
    except (*_DEPENDS_ON_DATA, *_WRONG_CALL, _WRONG_FORMULA) as error:
        is_aten = overload.namespace == "aten" and not is_told(call.name)
        if is_aten and not _has_meta_kernel(overload):
            _without_kernel.add(overload)
        raise NoTypes(str(error)) from error
    return wanted(call, as_on_cpu(overload, call.args, call.kwargs, _types_of(found)))


def _by_rule(call: Call) -> Types:
    """For an overload that no Meta kernel knows: the rule's shapes, or the stated ones.

    Whether PyTorch takes its operands, and of which dtypes the results are, the CPU's kernel says of
    operands that have few elements along each dimension.
    """
    found = _by_probe(cpu_probe.shrunk(call))
    if found is None:
        raise NoTypes(f"the CPU's kernel gives no types for {call.overload}")
    dtypes = [None if type is None else type[1] for type in found]
    try:
        shapes = result_shapes(call, dtypes)
    except Unsupported as error:
        raise NoTypes(str(error)) from error
    return tuple(
        [None if dtype is None else pair for dtype, pair in zip(dtypes, zip(shapes, dtypes))]
    )


def _asked(call: Call) -> list[Any]:
    """Return its results for tensors without memory, in order.

    A fake tensor says that it is on the CPU, for which some kernels give other types, or take what
    they refuse of a meta tensor. The first one of a process imports what takes a second.
    """
    has_rule = rule_of(call.name) is not None
    if not has_rule and call.overload in _DEPENDS_ON_DEVICE:
        return _asked_of_fakes(call)
    try:
        return _asked_on(_META, call)
    except _WRONG_CALL:
        if has_rule or not _has_meta_kernel(call.overload):
            raise
        return _asked_of_fakes(call)


def _asked_of_fakes(call: Call) -> list[Any]:
    with _fake():
        return _asked_on(CPU, call)


def _asked_on(device: torch.device, call: Call) -> list[Any]:
    @functools.cache
    def twin(value: CallResult) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device=device)

    def given(part: Any) -> Any:
        kind = part.__class__
        if kind is CallResult:
            return twin(part)
        if kind is Scalar:
            return part.sample
        return device if kind is torch.device else part

    args, kwargs = call.filled(given)
    with torch.no_grad():
        made = call.overload(*args, **kwargs)
    return in_order(args, kwargs, call.mutated, call.returned, made)


def _has_meta_kernel(overload: Any) -> bool:
    """Return True if it can be called on tensors without memory: by a kernel, or as it is composed."""
    return any(has_kernel(overload.name(), key) for key in _TAKE_META)


def _counts_data(overload: Any) -> bool:
    """Return True if values decide its results, or their shapes, by torch's tags.

    Asked here, since to find that out with fake tensors imports what takes a second.
    """
    return not (_OF_DATA.isdisjoint(overload.tags) or overload.name() in _MAY_BE_TOLD)


def wanted(call: Call, types: Types) -> Types:
    """The types without those of gradients that `output_mask` leaves out.

    The CPU's kernels do not make these; some of Meta's make them all the same.
    """
    arguments = schema_of_overload(call.overload).arguments
    given = dict(zip((argument.name for argument in arguments), call.args)) | call.kwargs
    mask = given.get("output_mask")
    if mask is None or len(mask) != len(types):
        return types
    return tuple(kept if wanted else None for kept, wanted in zip(types, mask))


@contextlib.contextmanager
def _fake():
    """Tensors made in here say that they are on their device, and have no memory."""
    _refusals.are_answers = True
    try:
        with FakeTensorMode(allow_fallback_kernels=False):
            yield
    finally:
        _refusals.are_answers = False


class _Refusals(threading.local):
    """The flag that this thread's calls may be refused: torch would log that as an error."""

    are_answers = False


_refusals = _Refusals()
fake_tensor_log.addFilter(lambda record: not _refusals.are_answers)


def _by_probe(call: Call) -> Types | None:
    """The CPU kernel's own answer; None where stand-in values are none for it."""
    try:
        found = cpu_probe.run_on_stand_ins(call)
    except NotImplementedError:
        return None
    except cpu_probe.Refused as error:
        raise NoTypes(str(error)) from error
    return wanted(call, _types_of(found))


def _types_of(found: Iterable[Any]) -> Types:
    return tuple([None if one is None else _type_of(one) for one in found])


def _type_of(result: Any) -> tuple:
    if not isinstance(result, torch.Tensor):
        raise NoTypes(f"the result is a {type(result).__name__}, not a tensor")
    if result.layout is not torch.strided:
        raise NoTypes(f"the result has layout {result.layout}")
    if result.is_quantized:
        raise NoTypes("the result is quantized")
    return tuple(result.shape), result.dtype


# --- Writes where a mask says so, of one value for each element that it selects ------------------

# How many it selects is found when the step runs, and whether there are as many values: to ask
# PyTorch with stand-in masks would say no.

OVERLOADS = frozenset(
    {"aten::index_put", "aten::index_put_", "aten::_unsafe_index_put", "aten::_index_put_impl_"}
)


def may_be_taken(x: Any, indices: Sequence[Any], values: Any, *flags: Any) -> bool:
    """Return True if one mask is the only index, and the values may be as many as it selects."""
    named = [axis for axis, index in enumerate(indices) if index is not None]
    if len(named) != 1 or not all(v.__class__ is CallResult for v in (x, values)):
        return False
    mask, axis = indices[named[0]], named[0]
    if mask.dtype is not torch.bool or not mask.shape or values.dtype is not x.dtype:
        return False
    end = axis + len(mask.shape)
    if 0 in x.shape or 0 in values.shape or mask.shape != x.shape[axis:end]:
        return False
    most = (*x.shape[:axis], prod(mask.shape), *x.shape[end:])
    selected = len(most) - 1 - axis  # the dimension of the selected, counted from the last
    pairs = list(zip(reversed(values.shape), reversed(most)))
    fits = (n == 1 or (n <= m if k == selected else n == m) for k, (n, m) in enumerate(pairs))
    return len(values.shape) <= len(most) and all(fits)


# --- What Meta kernels tell wrong of the CPU --------------------------------------------------

# A backward asks its kernel with the forward's results, so both have to agree.


_NARROW = (torch.bfloat16, torch.float16)
_PARAMETERS = frozenset({"weight", "bias", "running_mean", "running_var"})


def as_on_cpu(overload: Any, args: Sequence[Any], kwargs: dict[str, Any], types: Types) -> Types:
    """The types of a call's results on the CPU.

    Args:
        overload: of torch's
        args: as recorded
        kwargs: as recorded
        types: of the results, as Meta's kernel tells them

    Returns:
        the same, corrected for the overloads that need it.
    """
    correction = _CORRECTIONS.get(overload.name())
    if correction is None:
        return types
    arguments = schema_of_overload(overload).arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip([a.name for a in arguments], args)) | kwargs
    return correction(overload, given, types)


# --- norms --------------------------------------------------------------------------------------


def _norm(kept: bool | None) -> Callable[[Any, dict, Types], Types]:
    """Return the correction for a norm.

    Statistics are float32 where a narrow operand has float32 parameters, else of the operand's
    dtype; a batch norm with running statistics alone keeps none. Running statistics that come back
    have the dtype that they came with.

    Args:
        kept: whether it normalizes with the batch's own statistics; None: `training` says it
    """

    def corrected(overload: Any, given: dict, types: Types) -> Types:
        returns = schema_of_overload(overload).returns
        keeps, dtype = given["training"] if kept is None else kept, _statistics_dtype(given)
        written = len(types) - len(returns)  # arguments come before results
        found = list(types)
        for place in (written + 1, written + 2):  # behind the normalized operand
            found[place] = (types[place][0] if keeps else (0,), dtype)
        for place, returned in enumerate(returns, written):
            if returned.name in ("running_mean_out", "running_var_out"):
                operand = given[returned.name.removesuffix("_out")]
                found[place] = (types[place][0], operand.dtype)
        return tuple(found)

    return corrected


def _statistics_dtype(given: dict) -> torch.dtype:
    dtype: torch.dtype = given["input"].dtype
    parameters = [
        v.dtype for n, v in given.items() if n in _PARAMETERS and v.__class__ is CallResult
    ]
    return torch.float32 if dtype in _NARROW and torch.float32 in parameters else dtype


# --- bags of rows -------------------------------------------------------------------------------


def _bags(keeps_for_backward: bool) -> Callable[[Any, dict, Types], Types]:
    def corrected(overload: Any, given: dict, types: Types) -> Types:
        (bags, dtype), (_, index) = types[0], types[1]
        shapes = noted_shapes(
            bags, dtype, given["indices"].shape, given["offsets"].shape, given["mode"],
            given["padding_idx"], keeps_for_backward,
        )  # fmt: skip
        return types[0], *[(tuple(shape), index) for shape in shapes]

    return corrected


# --- powers of bools ----------------------------------------------------------------------------


def _power(overload: Any, given: dict, types: Types) -> Types:
    """bool where base and exponent are: Meta takes the base for an integer."""
    bases, exponents = _listed(given["self"]), _listed(given["exponent"])
    if len(exponents) < len(bases):
        exponents = [*exponents] * len(bases)
    return tuple(
        [
            (shape, torch.bool if base.dtype is torch.bool and _is_bool(exponent) else dtype)
            for (shape, dtype), base, exponent in zip(types, bases, exponents)
        ]
    )


def _listed(argument: Any) -> Sequence[Any]:
    return argument if isinstance(argument, (list, tuple)) else [argument]


def _is_bool(exponent: Any) -> bool:
    return isinstance(exponent.sample if exponent.__class__ is Scalar else exponent, bool)


_CORRECTIONS: dict[str, Callable[[Any, dict, Types], Types]] = {
    "aten::native_layer_norm": _norm(True),
    "aten::native_group_norm": _norm(True),
    "aten::native_batch_norm": _norm(None),
    "aten::_native_batch_norm_legit": _norm(None),
    "aten::_native_batch_norm_legit.no_stats": _norm(True),
    "aten::_native_batch_norm_legit_functional": _norm(None),
    "aten::_native_batch_norm_legit_no_training": _norm(False),
    "aten::_batch_norm_with_update": _norm(True),
    "aten::_batch_norm_with_update_functional": _norm(True),
    "aten::_batch_norm_no_update": _norm(False),
    "aten::_embedding_bag": _bags(True),
    "aten::_embedding_bag_forward_only": _bags(False),
    "aten::pow.Tensor_Scalar": _power,
    "aten::_foreach_pow.Scalar": _power,
    "aten::_foreach_pow.ScalarList": _power,
}
