"""A call that runs at once, on PyTorch's kernel for its overload.

For every call that is as most are.  What needs a rule (random numbers, memory without values, what
the kernel refuses) is left to the thorough way, which knows all of them: NeedsRule says so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ltc.backends.kernel_call import CPU, REFUSALS, KernelCall
from ltc.backends.plain_dispatch import PlainDispatch, is_plain_now
from ltc.device.immediate.computed import computed
from ltc.device.immediate.immediate_session import ImmediateSession
from ltc.device.recording.entries import Interrupted
from ltc.device.recording.recorder import Recorder
from ltc.device.recording.signature import OPTIONAL_TENSORS, TENSORS, Signature
from ltc.device.recording.state import State
from ltc.device.recording.tensors import device_of, wrap, wrap_all
from ltc.device.recording.views import link_all, link_by, links_of, write
from ltc.device.shapes.meta import has_mask
from ltc.device.timed_calls import note_call
from ltc.device.torch_device import storage_of
from ltc.support.observation import spans
from ltc.support.torch_private import DEVICE_TYPE

_LISTS = frozenset({TENSORS, OPTIONAL_TENSORS})
_OTHER_LAYOUTS = (
    "sparse",
    "mkldnn",
    "nested",
    "quantize_",
)  # their kernels make what no ltc tensor can hold


class NeedsRule(Exception):
    """The call cannot be run here; nothing was written."""


class ImmediateKernel(KernelCall):
    """A way to run the calls of one overload when they are made.

    Attributes:
        runs_here: True if they can, as far as the overload decides.
        makes_one: True if all they do is to make a tensor.
        tensors: (place, True if it is a list) of each argument that takes tensors.
        device: The place of the argument that names a device, or None.
        layout: The place of the argument that names a layout, or None.
        may_read: True if the shape of what it makes may depend on values: see `reads`.
    """

    def __init__(self, signature: Signature) -> None:
        super().__init__(signature.overload)
        self.signature = signature
        self.runs_here = not (
            signature.random
            or signature.checks_values
            or signature.may_resize
            or not signature.returns_tensors
            or not (signature.tensors or signature.device is not None)
            or self.leaves_undefined
            or any(word in signature.name for word in _OTHER_LAYOUTS)
        )
        self.tensors = [(i, a.kind in _LISTS) for i, a in signature.tensors]
        self.device = signature.device
        places = {a.name: i for i, a in enumerate(signature.arguments)}
        self.layout = places.get("layout")
        self.writes = bool(signature.written)
        self.makes_one = signature.makes_one_tensor
        self.may_read = torch.Tag.dynamic_output_shape in signature.overload.tags
        self._takes_indices = any([is_list for _, is_list in self.tensors])

    def reads(self, values: Sequence[Any]) -> bool:
        """Return True if such a call would end a recording: its result's shape depends on values.

        Indices select by their shape, masks by their values.
        """
        return self.may_read and (self.has_masks(values) or not self._takes_indices)

    def has_masks(self, values: Sequence[Any]) -> bool:
        """Return True if a call with these arguments selects as many elements as masks say."""
        if not (self.may_read and self._takes_indices):
            return False
        return any([has_mask(values[place]) for place, is_list in self.tensors if is_list])


@functools.cache
def how_to_run(signature: Signature) -> ImmediateKernel:
    return ImmediateKernel(signature)


def run(
    kernel: ImmediateKernel, session: ImmediateSession, values: Sequence[Any], noting: Any
) -> Any:
    """Return the overload's result; raises NeedsRule before anything is changed.

    Args:
        values: every argument, in schema order.
        noting: called with the tensors that the kernel wrote to and made, before anything holds
            them; returns the noted results, or None. None where the call is not noted.
    """
    recorder = session.recorder
    # Another thread that was to end it has to look again. A profile wants every call here.
    if spans.timeline is None:
        session.go_on()
    else:
        session.stop()
    operands = _operands(kernel, session, values)
    session.calls += 1
    if kernel.may_read and kernel.reads(values):
        session.look_at_values(kernel.signature.name)
    if kernel.signature.has_no_result:
        _called(kernel, operands, False)
        session.note_read()  # it looks at values, and raises
        return None
    if kernel.makes_one:
        made = _called(kernel, operands, False)
        if kernel.may_return_operand:
            made = torch.ops.aten.alias(made)
        noted = None if noting is None else noting([made])
        return wrap(recorder, computed(recorder, made, None if noted is None else noted[0]))
    return _with_writes_and_views(kernel, session, values, operands, noting)


def _operands(kernel: ImmediateKernel, session: ImmediateSession, values: Any) -> list:
    """The arguments with CPU tensors in place of lazy ones."""
    recorder, operands = session.recorder, list(values)
    for place, is_list in kernel.tensors:
        operand = values[place]
        if is_list:
            operands[place] = _tensors(session, recorder, operand)
        elif operand is not None:
            operands[place] = _tensor(session, recorder, operand)
        operands[place] = kernel.laid(operands[place])
    if kernel.device is not None:
        _require_here(recorder, operands[kernel.device])
        operands[kernel.device] = CPU
    if kernel.layout is not None and operands[kernel.layout] not in (None, torch.strided):
        raise NeedsRule
    return operands


def _require_here(recorder: Recorder, device: torch.device | None) -> None:
    if device is None or device == recorder.device.torch_device:
        return
    if device.type != DEVICE_TYPE or device_of(device) is not recorder.device:
        raise NeedsRule


def _with_writes_and_views(
    kernel: ImmediateKernel, session: ImmediateSession, values: Any, operands: list, noting: Any
) -> Any:
    signature, recorder = kernel.signature, session.recorder
    written = signature.written_by(values) if kernel.writes else ()
    for place in written:
        operands[place] = _own(session, values[place], operands)
    made = _called(kernel, operands, kernel.writes)
    others = _others(signature, made, bool(written))
    left = [one for place in written for one in _several(operands[place])]
    session.written_in_lists += max(0, len(left) - 1)
    noted = iter(_noted([*left, *others], noting))
    for place in written:
        _hold(session, values[place], operands[place], noted)
    if signature.returns_written:
        return signature.returned(values)
    results = _all_computed(recorder, others, noted)
    if signature.is_view:
        return _views(recorder, signature, values, made, results)
    return wrap_all(recorder, signature, results)


def _others(signature: Signature, made: Any, writes: bool) -> Sequence[Any]:
    """Return the tensors that a kernel has made besides those it wrote to."""
    if signature.returns_written:
        return ()
    several = _several(made)
    return several[len(several) - len(signature.returns) :] if writes else several


def _several(made: Any) -> Sequence[Any]:
    return made if isinstance(made, (list, tuple)) else (made,)


def _noted(made: list[Any], noting: Any) -> Sequence[Any]:
    """The noted results of a call, one for each; None of each where it is not noted."""
    results = None if noting is None else noting(made)
    return [None] * len(made) if results is None else results


def _called(kernel: ImmediateKernel, operands: list, writes: bool) -> Any:
    if spans.timeline is None:
        return _ran(kernel, operands, writes)
    began = spans.now()
    made = _ran(kernel, operands, writes)
    note_call(kernel.signature.overload, operands, {}, (made,), began)
    return made


def _ran(kernel: ImmediateKernel, operands: list, writes: bool) -> Any:
    args, kwargs = kernel.by_name(operands)
    try:
        if is_plain_now():
            return kernel.function(*args, **kwargs)
        with PlainDispatch():
            return kernel.function(*args, **kwargs)
    except REFUSALS as error:
        if writes and kernel.may_have_written(error):
            raise  # some of it may have been written: the rule must not read that
        raise NeedsRule from error


def _tensor(session: ImmediateSession, recorder: Recorder, operand: Any) -> Any:
    """The CPU tensor of a lazy one; numbers as they are."""
    try:
        state: State = storage_of(operand).lazy
    except (AttributeError, TypeError, NotImplementedError):
        return _other(operand)
    value: Any = state.value
    if value is None:
        if state.buffer is None or state.device is not recorder.device:
            raise NeedsRule
        value = state.value = session.bind(state)
    elif value.recorder is not recorder:
        raise NeedsRule
    return value.tensor


def _tensors(session: ImmediateSession, recorder: Recorder, operands: Any) -> list:
    try:
        values = [storage.lazy.value for storage in map(storage_of, operands)]
        if all(values):
            return tensors_here(recorder, values)
    except (AttributeError, TypeError, NotImplementedError):
        pass  # not all have a value
    return [_tensor(session, recorder, operand) for operand in operands]


def tensors_here(recorder: Recorder, values: Sequence[Any]) -> list:
    """Their tensors, None for None; raises AttributeError where one was not computed here."""
    if not {value.recorder for value in values if value is not None} <= {recorder}:
        raise Interrupted
    return [None if value is None else value.tensor for value in values]


def _other(operand: Any) -> Any:
    if not isinstance(operand, torch.Tensor):
        return operand
    if operand.device.type == "cpu" and operand.dim() == 0:
        return operand.detach()
    raise NeedsRule


def _own(session: ImmediateSession, operand: Any, read: Sequence[Any]) -> Any:
    if isinstance(operand, (list, tuple)):
        return session.own_all([storage.lazy for storage in map(storage_of, operand)])
    return session.own(storage_of(operand).lazy, *_parts(read))


def _parts(operands: Sequence[Any]) -> list:
    """All operands, those of lists one by one."""
    return [
        part
        for operand in operands
        for part in (operand if isinstance(operand, (list, tuple)) else [operand])
    ]


def _hold(session: ImmediateSession, operand: Any, tensor: Any, noted: Iterator[Any]) -> None:
    """The written `operand` has the value that the kernel has left in `tensor`."""
    if isinstance(operand, (list, tuple)):
        for storage, written in zip(map(storage_of, operand), tensor):
            hold(session, storage.lazy, written, next(noted))
    elif tensor.size() == operand.size():
        hold(session, storage_of(operand).lazy, tensor, next(noted))
    else:  # the kernel has resized it
        value = computed(session.recorder, tensor, next(noted))
        operand.data = wrap(session.recorder, value)


def hold(session: ImmediateSession, state: State, tensor: torch.Tensor, noted: Any) -> None:
    """`state` has the value that a kernel has left in `tensor`."""
    value: Any = state.value
    if value is None or value.tensor is not tensor:
        write(state, computed(session.recorder, tensor, noted))
        return
    state.buffer = None  # whoever else sees it has been told: see ImmediateSession.own
    if noted is not None:
        session.note_written(state, noted)


def _views(
    recorder: Recorder, signature: Signature, values: Any, made: Any, parts: Sequence[Any]
) -> Any:
    links = links_of(signature, link_of(signature, values, made), len(parts))
    return link_all(recorder, signature, values[0], parts, links)


def _all_computed(recorder: Recorder, made: Sequence[Any], noted: Iterator[Any]) -> list:
    """The value of each tensor that a kernel has made; None of an undefined one."""
    return [
        one if one is None else computed(recorder, one, result) for one, result in zip(made, noted)
    ]


def link_of(signature: Signature, values: Any, made: Any) -> tuple:
    """Return the links by which a call's views are derived from the viewed tensor."""
    arguments, source = signature.arguments, values[0]
    positional = [v for v, a in zip(values, arguments) if not a.keyword_only]
    keywords = {a.name: v for v, a in zip(values, arguments) if a.keyword_only and v is not None}
    shape = made.shape if isinstance(made, torch.Tensor) else source.shape
    return link_by(signature.overload, tuple(positional[1:]), keywords, source.shape, shape)
