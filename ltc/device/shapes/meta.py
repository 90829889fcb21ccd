"""What a call gives, found without running it: dtype and shape.

Formulas (formulas/) answer for common calls that are certain to be right, in some microseconds.  For
all others torch's Meta kernels are asked, which takes up to some milliseconds.  Some of these answer
for one kind of device, and take a meta tensor for CUDA's.  Where a call that will run PyTorch's CPU
kernel may be of these, they are asked with fake CPU tensors, so that the answer is that kernel's.  What
they tell wrong even so is corrected (norm_statistics.py, bag_types.py, bool_powers.py).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ltc.aten.call import CallResult, Scalar
from ltc.aten.registry import rule_of
from ltc.debug import metrics
from ltc.device.shapes import bag_types, bool_powers, cpu_probe, norm_statistics, type_cache
from ltc.device.shapes.formulas.table import types_by_formula
from ltc.support.bounded_table import BoundedTable
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
_META, _CPU = torch.device("meta"), torch.device("cpu")
# Of those that run PyTorch's CPU kernels, what gives or takes other types on the CPU than elsewhere.
_DEPENDS_ON_DEVICE = frozenset(
    {
        torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default,
        torch.ops.aten.histc.default,
    }
)  # fmt: skip
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


def result_types(
    overload: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    mutated: Sequence[int | str] = (),
    returned: bool = True,
) -> Types:
    """(shape, dtype) of every result in the order of `Call.results`; None for an undefined tensor.

    Raises NoTypes where the shape depends on data, where there is no Meta kernel, or where that
    kernel rejects the call: then the CPU kernel has to say what is wrong, in its own words.
    """
    types = types_by_formula(overload, args, kwargs)
    if types is not None:
        return types
    if overload in _without_kernel:  # however many kinds of calls there are of it
        raise NoTypes(f"{overload} has no Meta kernel")
    if overload is torch.ops.aten.index.Tensor:
        if has_mask(args[1]):
            raise NoTypes("the number of elements that a mask selects depends on data")
        if _reads_of_nothing(args[0].shape, args[1]):
            raise NoTypes("there is nothing in a dimension of size 0")
    key = _key(overload, args, kwargs)
    try:
        types = _known.get(key)
    except TypeError:  # an argument that does not hash
        return _infer(overload, args, kwargs, mutated, returned)
    if types is not None:
        return types
    if key in _unknowable:
        raise NoTypes(_unknowable[key])
    types = type_cache.look_up(overload, key)
    if types is None:
        try:
            types = _infer(overload, args, kwargs, mutated, returned)
        except NoTypes as error:
            _unknowable.keep(key, str(error))  # who asks gives no values: the answer is the same
            raise
        type_cache.note(overload, key, types)
    return _known.keep(key, types)


def has_mask(indices: Sequence[Any]) -> bool:
    """Whether one of these tensors chooses by its values: then these decide how many there are.

    Asked here, since to say so torch's Meta kernel imports what takes half a second.
    """
    return any([x is not None and x.dtype in _MASKS for x in indices])


def _reads_of_nothing(shape: Sequence[int], indices: Sequence[Any]) -> bool:
    """Whether indices ask for elements of a dimension that has none: the Meta kernel does not look."""
    named = [(n, index) for n, index in zip(shape, indices) if index is not None]
    return any(n == 0 for n, _ in named) and not any(0 in index.shape for _, index in named)


def _key(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple:
    """What the types of the results depend on, in one tuple: Python's collector counts those."""
    parts = [overload, torch.get_default_dtype()]
    _add_key(parts, args)
    for name, value in kwargs.items():
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


def _infer(
    overload: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    mutated: Sequence[int | str],
    returned: bool,
) -> Types:
    if rule_of(overload.name()) is None and _counts_data(overload):
        raise NoTypes("the shape of its result depends on data")
    metrics.count("MetaInference")
    known = [*args, *kwargs.values()]
    if _runs_its_kernel(overload) and cpu_probe.makes_little(known):
        types = _by_probe(overload, args, kwargs, mutated, returned)
        return types or _by_meta(overload, args, kwargs, mutated, returned)
    types = _by_meta(overload, args, kwargs, mutated, returned)
    if not cpu_probe.is_small(known, types):
        return types
    found = _by_probe(overload, args, kwargs, mutated, returned)
    return found if found and rule_of(overload.name()) is None else types


@functools.cache
def _runs_its_kernel(overload: Any) -> bool:
    """Whether a call runs PyTorch's CPU kernel, by no rule, and torch tells its types without it.

    What nobody tells may depend on data, though no tag says so: stand-in values would decide it.
    """
    is_plain = overload.namespace == "aten" and rule_of(overload.name()) is None
    return is_plain and _OF_DATA.isdisjoint(overload.tags) and _has_meta_kernel(overload)


def _by_meta(
    overload: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    mutated: Sequence[int | str],
    returned: bool,
) -> Types:
    try:
        result, twin_args, twin_kwargs = _asked(overload, args, kwargs)
    except (*_DEPENDS_ON_DATA, *_WRONG_CALL, _WRONG_FORMULA) as error:
        if overload.namespace == "aten" and not _has_meta_kernel(overload):
            _without_kernel.add(overload)
        raise NoTypes(str(error)) from error
    types = _types_of(result, twin_args, twin_kwargs, mutated, returned)
    types = norm_statistics.as_on_cpu(overload, args, kwargs, types)
    types = bag_types.as_on_cpu(overload, args, kwargs, types)
    types = bool_powers.as_on_cpu(overload, args, types)
    return _wanted(overload, args, kwargs, types)


def _asked(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list, dict]:
    """What it gives for tensors without memory, and the arguments and keywords that it was given.

    A fake tensor says that it is on the CPU, for which some kernels give other types, or take what
    they refuse of a meta tensor.  The first one of a process imports what takes a second.
    """
    has_rule = rule_of(overload.name()) is not None
    if not has_rule and overload in _DEPENDS_ON_DEVICE:
        return _asked_of_fakes(overload, args, kwargs)
    try:
        return _asked_on(_META, overload, args, kwargs)
    except _WRONG_CALL:
        if has_rule or not _has_meta_kernel(overload):
            raise
        return _asked_of_fakes(overload, args, kwargs)


def _asked_of_fakes(
    overload: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, list, dict]:
    with _fake():
        return _asked_on(_CPU, overload, args, kwargs)


def _asked_on(
    device: torch.device, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, list, dict]:
    twins: dict[CallResult, torch.Tensor] = {}
    with torch.no_grad():
        twin_args = [_twin(argument, twins, device) for argument in args]
        twin_kwargs = {name: _twin(value, twins, device) for name, value in kwargs.items()}
        return overload(*twin_args, **twin_kwargs), twin_args, twin_kwargs


def _has_meta_kernel(overload: Any) -> bool:
    """Whether it can be called on tensors without memory: by a kernel, or as it is composed."""
    return any(has_kernel(overload.name(), key) for key in _TAKE_META)


def _counts_data(overload: Any) -> bool:
    """Whether values decide what it gives, or of which shape, as torch says.

    Asked here, since to find that out with fake tensors imports what takes a second.
    """
    return not (_OF_DATA.isdisjoint(overload.tags) or overload.name() in _MAY_BE_TOLD)


def _wanted(overload: Any, args: Sequence[Any], kwargs: dict[str, Any], types: Types) -> Types:
    """The types without those of gradients that `output_mask` leaves out.

    The CPU's kernels do not make these; some of Meta's make them all the same.
    """
    given = (
        dict(zip((argument.name for argument in schema_of_overload(overload).arguments), args))
        | kwargs
    )
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
    """Whether what this thread asks may be refused: torch would log that as an error."""

    are_answers = False


_refusals = _Refusals()
fake_tensor_log.addFilter(lambda record: not _refusals.are_answers)


def _by_probe(
    overload: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    mutated: Sequence[int | str],
    returned: bool,
) -> Types | None:
    """The CPU kernel's own answer; None where stand-in values are none for it."""
    try:
        found = cpu_probe.run_on_stand_ins(overload, args, kwargs, mutated)
    except NotImplementedError:
        return None
    except cpu_probe.Refused as error:
        raise NoTypes(str(error)) from error
    return _types_of(*found, mutated, returned)


def _types_of(
    result: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    mutated: Sequence[int | str],
    returned: bool,
) -> Types:
    types: list = []
    for name in mutated:
        _collect(args[name] if isinstance(name, int) else kwargs[name], types)
    if returned:
        _collect(result, types)
    return tuple(types)


def _twin(argument: Any, twins: dict, device: torch.device):
    kind = argument.__class__
    if kind is CallResult:
        if argument not in twins:
            twins[argument] = torch.empty(argument.shape, dtype=argument.dtype, device=device)
        return twins[argument]
    if kind is Scalar:
        return argument.sample
    if kind is list or kind is tuple:
        return [_twin(part, twins, device) for part in argument]
    if kind is torch.device:
        return device
    return argument


def _collect(result: Any, types: list) -> None:
    if result is None:
        types.append(None)
    elif isinstance(result, torch.Tensor):
        if result.layout is not torch.strided:
            raise NoTypes(f"the result has layout {result.layout}")
        types.append((tuple(result.shape), result.dtype))
    elif isinstance(result, (list, tuple)):
        for part in result:
            _collect(part, types)
    else:
        raise NoTypes(f"the result is a {type(result).__name__}, not a tensor")
