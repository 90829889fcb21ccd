"""The thorough way to record a call: every kind of operand, every error; a kernel that does not
recognise what comes next on its path ends up here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ltc import config
from ltc.aten.call import Call, CallResult, Scalar
from ltc.device.evidence import misplaced
from ltc.device.evidence.cuts_explained import too_much_pending
from ltc.device.immediate.computed import ComputedValue
from ltc.device.immediate.immediate_session import ImmediateSession
from ltc.device.recording import fallback, run_now
from ltc.device.recording.entangled_lists import is_entangled, one_by_one
from ltc.device.recording.gradient_views import accumulates
from ltc.device.recording.recorder import Device, Recorder
from ltc.device.recording.signature import (
    ATTRIBUTE,
    DEVICE,
    GENERATOR,
    IGNORED,
    NUMBER,
    NUMBERS,
    OPTIONAL_TENSORS,
    TENSORS,
    Argument,
    Signature,
)
from ltc.device.recording.strides import repeats
from ltc.device.recording.sync import exclusively, flush, value_of
from ltc.device.recording.tensors import (
    adopt,
    device_of_call,
    is_lazy,
    state_of,
    to_device,
    wrap,
    wrap_all,
)
from ltc.device.recording.views import link_all, link_by, links_of, write
from ltc.device.shapes.meta import NoTypes, result_types, wanted
from ltc.device.shapes.numbers_that_fit import refuse_what_does_not_fit
from ltc.device.torch_device import storage_of
from ltc.device.user_line import user_line, warn_user
from ltc.errors import NotLazyTensor
from ltc.runtime.executor import executor_of
from ltc.support.observation import metrics
from ltc.support.torch_private import plain_functions, shown_region

_NUMBER_TYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
_INDEXING = frozenset(
    {
        "aten::index.Tensor", "aten::_unsafe_index.Tensor", "aten::index.Tensor_out",
        "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put",
    }
)  # fmt: skip
_NOT_RECORDED = frozenset({DEVICE, IGNORED})
_META = torch.device("meta")
# What a tensor raises, asked for its state, that is none of ltc's or has no state yet.
OTHER_OPERAND = (AttributeError, TypeError, NotImplementedError)
RESIZES = "resizes"  # in the key of an entry that changes the shape of what it writes to


def record(signature: Signature, *args: Any, **kwargs: Any):
    """Record one call and return what the overload returns; the way for every special case."""
    with metrics.timed("LazyTracing"), plain_functions(), shown_region("ltc::record"):
        values = signature.in_schema_order(args, kwargs)
        try:
            return _record(signature, values)
        except NotLazyTensor as error:
            names = [argument.name for argument in signature.arguments]
            misplaced.name_argument(error, signature.name, names, values)
            raise


def _record(signature: Signature, values: list):
    device = device_of_call(signature, values)
    if device is None:
        return fallback.run_on_cpu(signature, values)
    if signature.checks_values:
        _check_values(signature, values)
    if is_forced(signature):
        return fallback.run_eagerly(signature, values, device)
    if signature.writes_some and repeats(state_of(values[0])) and not accumulates():
        return fallback.run_on_repetitions(signature, values)
    if signature.writes_lists and is_entangled(signature, values):
        return one_by_one(signature, values, _record)
    recorder = device.recorder()
    if _is_read_first(recorder, signature, values):
        return fallback.run_eagerly(signature, values, device)  # no type tells how many are chosen
    try:
        return exclusively(recorder, _extend, recorder, signature, values)
    except NoTypes:
        return fallback.run_eagerly(signature, values, device)
    finally:
        recorder.drawn = None


def _is_read_first(recorder: Recorder, signature: Signature, values: list) -> bool:
    """Return True if a call that is noted, followed or recorded has to look at values first."""
    session, kernel = recorder.immediate, run_now.how_to_run(signature)
    if session is None:
        return signature.has_no_result or kernel.has_masks(values)
    return session.notes is not None and (signature.has_no_result or kernel.reads(values))


def _extend(recorder: Recorder, signature: Signature, values: list):
    """Record one call behind the others; raises NoTypes where it has to be run to be known."""
    if recorder.immediate is not None and recorder.immediate.is_over:
        flush(recorder)
    if recorder.immediate is not None:
        return _run(recorder, recorder.immediate, signature, values)
    if recorder.too_long:
        cut(recorder)
    lowered = _Lowered(recorder, signature, values)
    entry = recorder.advance(lowered.key, lowered.make_call)
    recorder.scalars.extend(lowered.numbers)
    # of one that is refused nobody gets what has been recorded by now
    refuse_what_does_not_fit(signature.op, signature.converted, values, entry.call.results)
    return _results(recorder, signature, values, entry)


def _run(recorder: Recorder, session: ImmediateSession, signature: Signature, values: list):
    """Run one call, and note it."""
    values = _with_indices_here(recorder, signature, values)
    kernel = run_now.how_to_run(signature)
    for i, _ in signature.tensors:
        _bind_tensors(recorder, values[i])
    noting = None if session.notes is None else _Noting(recorder, session, signature, values)
    if kernel.runs_here:
        try:
            return run_now.run(kernel, session, values, noting)
        except run_now.NeedsRule:
            if signature.has_no_result:
                raise NoTypes from None  # it exists for the error that it raises
    lowered = _Lowered(recorder, signature, values)
    call = lowered.make_call()
    refuse_what_does_not_fit(signature.op, signature.converted, values, call.results)
    ran = session.run(call, lowered.numbers)
    if noting is not None:
        for value, noted in zip(call.results, noting(call.results) or ()):
            if value is not None:
                value.noted = noted
    return _results(recorder, signature, values, ran)


def _with_indices_here(recorder: Recorder, signature: Signature, values: list) -> list:
    """The values, with a lazy copy of each index that lies on the CPU."""
    if signature.name not in _INDEXING:
        return values

    def here(part: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return [here(one) for one in part]
        if not isinstance(part, torch.Tensor) or part.device.type != "cpu" or part.dim() == 0:
            return part
        return to_device(part, recorder.device) if part.dtype in _INDEX_TYPES else part

    return [here(value) for value in values]


def _bind_tensors(recorder: Recorder, operand: Any) -> None:
    """Every lazy tensor in it has a value in this recording."""
    if isinstance(operand, (list, tuple)):
        for part in operand:
            _bind_tensors(recorder, part)
    elif isinstance(operand, torch.Tensor) and is_lazy(operand):
        value_of(state_of(operand, recorder.device))


def is_forced(signature: Signature) -> bool:
    """Return True if LTC_FORCE_FALLBACK names this op; read when its kernel is built."""
    named = config.value("LTC_FORCE_FALLBACK")
    return bool(named) and signature.op in named.split(",")


def _check_values(signature: Signature, values: list) -> None:
    """Raise eager's error for numbers out of range, found on a tensor without elements."""
    empty = torch.empty(0, dtype=values[0].dtype, device="cpu")
    numbers = [v for v, a in zip(values, signature.arguments) if not a.keyword_only]
    signature.overload(empty, *numbers[1:])


def cut(recorder: Recorder) -> None:
    """Start the pending calls because no step was marked for a long while; warn of it once."""
    metrics.count("TrimIrGraph")
    device: Device = recorder.device
    last = recorder.last
    marks = executor_of(device.index).marks
    too_much_pending(last.depth, last.size, marks)
    if not device.warned_of_no_mark:
        device.warned_of_no_mark = True
        since = f"since the last of {marks} step marks" if marks else "without a step mark"
        warn_user(
            f"{last.depth} calls with {last.size >> 20} MiB of results were recorded on {device} "
            f"{since}; they start now, at {user_line()}. Call ltm.mark_step() once per step; if each step is "
            f"marked already, use smaller batches. "
            f"(Limits: LTC_MAX_PENDING_NODES, LTC_MAX_PENDING_BYTES.)"
        )
    flush(recorder)


class _Lowered:
    """The operands of one call as the recorder keeps them.

    Attributes:
        key: The identity of the call on its path.
        numbers: The numbers that it adds to the recording's scalars.
    """

    def __init__(self, recorder: Recorder, signature: Signature, values: list) -> None:
        self.recorder, self.signature, self.values = recorder, signature, values
        self.numbers: list = []
        self.first_slot = self._first_slot()
        self.seed = self._seed() if signature.random else None
        parts: list = [signature.overload]
        self.template: list = []
        self.args: list = []
        self.kwargs: dict[str, Any] = {}
        tensors = {i: self._tensors(a.kind, values[i]) for i, a in signature.tensors}
        # all buffers are bound before any number is added, as in the generated kernels
        for i, argument in enumerate(signature.arguments):
            kind = argument.kind
            if i in tensors:
                part, operand = self._name_numbers(argument, tensors[i])
                parts.append(part)
            elif kind == ATTRIBUTE:
                operand = values[i]
                parts.append(operand)
            elif kind in _LOWER:
                part, operand = _LOWER[kind](self, argument, values[i])
                parts.append(part)
            else:
                operand = None
            self.template.append(operand)
            if kind == GENERATOR:
                continue  # always last; the seed takes its place
            if not argument.keyword_only:
                self.args.append(argument.default if kind in _NOT_RECORDED else operand)
            elif operand is not None:
                self.kwargs[argument.name] = operand
        if signature.may_resize and self._resizes():
            parts.append(RESIZES)
            self._give_empty_outs()
        if config.value("LTC_LINES"):
            parts.append(user_line())
        self.key = tuple(parts)

    def _first_slot(self) -> int:
        return len(self.recorder.scalars)

    def _named(self, value: CallResult) -> CallResult:
        """The value as an operand of the call."""
        return value.as_operand() if value.__class__ is ComputedValue else value

    def _seed(self) -> Scalar:
        generator = None
        for argument, value in zip(self.signature.arguments, self.values):
            if argument.kind == GENERATOR:
                generator = value
        return self._number(_draw(self.recorder, generator), "seed")

    def _number(self, number: Any, origin: str) -> Scalar:
        slot = self.first_slot + len(self.numbers)
        self.numbers.append(number)
        if isinstance(number, torch.Tensor):
            return Scalar(slot, number, number.dtype, False, origin)
        return Scalar(slot, number, _NUMBER_TYPES[type(number)], True, origin)

    def _tensors(self, kind: str, operand: Any):
        """Values in place of lazy tensors; numbers and 0-dim CPU tensors are left for later."""
        if kind in (TENSORS, OPTIONAL_TENSORS):
            return [self._tensor(part) for part in operand]
        return self._tensor(operand)

    def _tensor(self, operand: Any):
        if not isinstance(operand, torch.Tensor):
            return operand
        try:
            state = storage_of(operand).lazy
        except OTHER_OPERAND:
            return self._other_tensor(operand)
        recorder, value = self.recorder, state.value
        if value is not None and value.recorder is recorder:
            return value  # so it is on the recorder's device
        return value_of(state_of(operand, recorder.device))

    def _other_tensor(self, operand: torch.Tensor):
        """One that no call of ltc's has made: on another device, or not asked for yet."""
        if operand.device.type == "cpu" and operand.layout is torch.strided:
            if operand.dim() == 0:
                return operand
            if self.signature.name in _INDEXING and operand.dtype in _INDEX_TYPES:
                return value_of(adopt(operand, self.recorder.device))
        return value_of(state_of(operand, self.recorder.device))

    def _name_numbers(self, argument: Argument, operand: Any):
        """(part of the key, operand of the call) for what `_tensors` gave."""
        if operand.__class__ is ComputedValue:
            operand = self._named(operand)
        if operand is None or operand.__class__ is CallResult:
            return operand, operand
        if operand.__class__ is list:
            pairs = [self._name_numbers(argument, part) for part in operand]
            return [p for p, _ in pairs], [o for _, o in pairs]
        if isinstance(operand, torch.Tensor):
            number = operand.detach().clone()  # the caller may change it before the step runs
            return ("cpu", number.dtype), self._number(number, argument.name)
        return operand.__class__, self._number(operand, argument.name)

    def _lower_number(self, argument: Argument, value: Any):
        static = argument.static
        if static is None or (static and value in static):
            return (value.__class__, value), value
        if value is None:
            return value.__class__, None
        return value.__class__, self._number(value, argument.name)

    def _lower_numbers(self, argument: Argument, values: Sequence[Any]):
        if values is None:
            return None, None
        return [v.__class__ for v in values], [self._number(v, argument.name) for v in values]

    def _resizes(self) -> bool:
        """Return True if an `out=` tensor does not have the shape of the result yet.

        The result does not depend on that tensor's shape. For an empty one, PyTorch does not warn
        of another shape.
        """
        outs = self._outs_as(CallResult.without_elements)
        try:
            types = iter(self._types(self._written(), outs))
        except NoTypes:
            return False
        for position in self.signature.written:
            operands = self.template[position]
            for value in operands if operands.__class__ is list else [operands]:
                if value is not None and (value.shape, value.dtype) != next(types, None):
                    return True
        return False

    def _written(self) -> tuple:
        """Arguments written to, as `Call.mutated` names them; one that is None is not written."""
        arguments = self.signature.arguments
        if not self.signature.written:
            return ()
        return tuple(
            arguments[i].name if arguments[i].keyword_only else i
            for i in self.signature.written_by(self.values)
        )

    def _give_empty_outs(self) -> None:
        """Give the call tensors without elements in place of those to be resized, which are no
        operands.
        """

        def empty(value: CallResult) -> CallResult:
            plain = torch.empty(0, dtype=value.dtype, device="cpu")
            return self._named(value_of(adopt(plain, self.recorder.device)))

        self.kwargs |= self._outs_as(empty)

    def _outs_as(self, function: Callable[[CallResult], CallResult]) -> dict[str, Any]:
        return {name: _each(function, self.kwargs.get(name)) for name in self.signature.outs}

    def _types(self, written: tuple, outs: Mapping[str, Any] = MappingProxyType({})):
        """`outs`: what stands for operands of these names."""
        signature, kwargs = self.signature, {**self.kwargs, **outs}
        if signature.device is not None:
            kwargs["device"] = _META
        returned = not signature.returns_written
        return result_types(Call(signature.overload, self.args, kwargs, written, returned))

    def make_call(self) -> Call:
        written = self._written()
        types = self._types(written)
        call = self._call(written)
        self.recorder.values(call, types)
        return call

    def _call(self, written: tuple) -> Call:
        signature = self.signature
        return Call(
            signature.overload,
            tuple(self.args),
            self.kwargs,
            written,
            not signature.returns_written,
            user_line(),
            self.seed,
        )


class _NotedOperands(_Lowered):
    """The same of a call that has run: with noted values in place of computed ones."""

    def _first_slot(self) -> int:
        session = self.recorder.immediate
        assert session is not None
        return len(session.numbers)

    def _named(self, value: Any) -> CallResult:
        if value.noted is None:
            raise _NotNoted
        noted: CallResult = value.noted
        return noted

    def _tensor(self, operand: Any):
        found = super()._tensor(operand)
        return self._named(found) if found.__class__ is ComputedValue else found

    def call_of(self, made: Sequence[Any]) -> Call:
        """Return the call, which has made these: tensors or computed values, or None."""
        types = tuple([None if one is None else (tuple(one.shape), one.dtype) for one in made])
        call = self._call(self._written())
        self.recorder.values(call, wanted(call, types))
        return call


class _NotNoted(Exception):
    """An operand was made by what was not noted."""


class _Noting:
    """Notes one call: before anything holds what it has made."""

    def __init__(
        self, recorder: Recorder, session: ImmediateSession, signature: Signature, values: list
    ) -> None:
        self._recorder, self._session = recorder, session
        self._signature, self._values = signature, values
        self._operands: Any = None

    def __call__(self, made: Sequence[Any]) -> tuple[CallResult | None, ...] | None:
        """Return the noted results of the call, which has made these."""
        notes = self._session.notes
        if notes is None:
            return None
        if notes.last.depth >= config.value("LTC_MAX_PENDING_NODES"):
            self._session.stop_noting()
            return None
        try:
            entry = notes.note(self._key, lambda: self._operands.call_of(made))
        except _NotNoted:
            self._session.stop_noting()
            return None
        notes.numbers.extend(self._operands.numbers)
        results: tuple[CallResult | None, ...] = entry.call.results
        if self._signature.is_view:
            entry.link = links_of(self._signature, _link(entry.call), len(results))
        return results

    def _key(self) -> tuple:
        self._operands = _NotedOperands(self._recorder, self._signature, self._values)
        key: tuple = self._operands.key
        return key


def _each(function: Callable[[CallResult], CallResult], operand: Any) -> Any:
    if operand.__class__ is list:
        return [_each(function, part) for part in operand]
    return function(operand) if operand.__class__ is CallResult else operand


_LOWER: dict[str, Any] = {NUMBER: _Lowered._lower_number, NUMBERS: _Lowered._lower_numbers}
_INDEX_TYPES = frozenset({torch.int64, torch.int32, torch.bool, torch.uint8})


def _draw(recorder: Recorder, generator: torch.Generator | None) -> int:
    """The seed of a random call: the device's next one, or one drawn from the user's generator."""
    if recorder.drawn is None:
        if generator is None:
            recorder.drawn = recorder.draw()
        else:
            recorder.drawn = int(torch.randint(-(2**63), 2**63 - 1, (), generator=generator))
    return recorder.drawn


# --- results ----------------------------------------------------------------------------------


def _results(recorder: Recorder, signature: Signature, values: list, entry: Any):
    if signature.makes_one_tensor:
        return wrap(recorder, entry.value)
    results = iter(entry.call.results)
    for i in signature.written_by(values):
        operand = values[i]
        for tensor in operand if isinstance(operand, (list, tuple)) else (operand,):
            _assign(recorder, signature, tensor, next(results))
    if signature.returns_written:
        return signature.returned(values)
    if signature.is_view:
        return _views(recorder, signature, values[0], entry)
    return wrap_all(recorder, signature, list(results))


def _assign(
    recorder: Recorder, signature: Signature, tensor: torch.Tensor, value: CallResult
) -> None:
    """`tensor` now holds `value`; an out= tensor of another shape takes the new one."""
    if value.shape != tuple(tensor.shape):
        if tensor.numel() != 0 and not signature.resizes_silently:
            warn_user(
                f"An output with one or more elements was resized since it had shape "
                f"{list(tensor.shape)}, which does not match the required output shape "
                f"{list(value.shape)}. Reuse an output of the right shape, or reset it with "
                f"t.resize_(0)."
            )
        tensor.data = wrap(recorder, value)
        return
    write(state_of(tensor, recorder.device), value)


def _views(recorder: Recorder, signature: Signature, viewed: torch.Tensor, entry: Any):
    state_of(viewed, recorder.device)  # there may be none yet
    values = entry.call.results
    entry.link = links_of(signature, _link(entry.call), len(values))
    return link_all(recorder, signature, viewed, values, entry.link)


def _link(call: Call) -> tuple:
    """Return the links by which the views of `call` are derived from the viewed tensor."""
    source: Any = call.args[0]
    first: Any = call.results[0] if call.results else source  # of several the shape does not matter
    return link_by(call.overload, tuple(call.args[1:]), call.kwargs, source.shape, first.shape)
