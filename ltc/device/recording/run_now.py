"""A call that runs at once, on PyTorch's kernel for its overload.

For every call that is as most are.  What needs a rule (random numbers, memory without values, what
the kernel refuses) is left to the thorough way, which knows all of them: NeedsRule says so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.wide_sums import cpu_function_of
from ltc.backends.interpreter.stride_rules import takes_any_strides
from ltc.backends.interpreter.torch_functions import (
    begins_undefined,
    may_return_operand,
    quick_function,
)
from ltc.backends.plain_dispatch import PlainDispatch, is_plain_now
from ltc.device.op_by_op.computed import computed
from ltc.device.op_by_op.unrecorded import OpByOp
from ltc.device.recording.recorder import Interrupted, Recorder
from ltc.device.recording.signature import OPTIONAL_TENSORS, TENSORS, Signature
from ltc.device.recording.state import State
from ltc.device.recording.tensors import device_of, wrap, wrap_all
from ltc.device.recording.views import link_all, link_by, links_of, write
from ltc.device.shapes.meta import has_mask
from ltc.device.timed_calls import note_call
from ltc.device.torch_device import storage_of
from ltc.profiling import spans
from ltc.support.torch_private import DEVICE_TYPE

CPU = torch.device("cpu")
_LISTS = frozenset({TENSORS, OPTIONAL_TENSORS})
_OWN = frozenset({"ltc::attention", "ltc::attention_gradient"})  # their formulas see to strides
# memory without values is zeros, in every tier
_WITH_VALUES = {
    "aten::empty_like": torch.ops.aten.zeros_like.default,
    "aten::new_empty": torch.ops.aten.new_zeros.default,
}
_OTHER_LAYOUTS = ("sparse", "mkldnn", "nested")  # their kernels make what no ltc tensor can hold


class NeedsRule(Exception):
    """The call cannot be run here; nothing was written."""


class TorchKernel:
    """How the calls of one overload are run.

    runs_here   whether they can be, as far as the overload decides
    call        what the overload calls
    quick       the same, or torch's Python function that comes to it in less time
    positional  how many arguments are passed by position; the others have `names`
    makes_one   whether all they do is to make a tensor
    may_be_operand  which may be one that they were given: then what holds it gets an alias
    tensors     (place, whether it is a list) of each argument that takes tensors
    device, layout  the places of these arguments, or None
    may_read    whether the shape of what it makes may depend on values: see `reads`
    """

    __slots__ = ("signature", "runs_here", "call", "quick", "count", "positional", "names", "tensors",
                 "any_strides", "writes", "writes_lists", "makes_one", "may_be_operand",
                 "device", "layout", "may_read", "_takes_indices")  # fmt: skip

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.runs_here = not (
            signature.random
            or signature.checks_values
            or signature.may_resize
            or not signature.returns_tensors
            or not (signature.tensors or signature.device is not None)
            or (begins_undefined(signature.name) and signature.name not in _WITH_VALUES)
            or any(word in signature.name for word in _OTHER_LAYOUTS)
        )
        self.call = cpu_function_of(_WITH_VALUES.get(signature.name, signature.overload))
        self.count = len(signature.arguments)
        self.names = [a.name for a in signature.arguments if a.keyword_only]
        self.positional = self.count - len(self.names)
        self.tensors = [(i, a.kind in _LISTS) for i, a in signature.tensors]
        self.device = signature.device
        places = {a.name: i for i, a in enumerate(signature.arguments)}
        self.layout = places.get("layout")
        self.any_strides = takes_any_strides(signature.name) or signature.name in _OWN
        self.writes = bool(signature.written)
        self.writes_lists = any(signature.arguments[i].kind in _LISTS for i in signature.written)
        self.makes_one = signature.makes_one_tensor
        # lists may have been written in part when it raises: nothing is tried there twice
        is_plain = signature.name not in _WITH_VALUES and signature.device is None
        is_tried = is_plain and not self.writes_lists
        quick = quick_function(signature.name, signature.overload) if is_tried else None
        self.quick = quick or self.call
        self.may_be_operand = may_return_operand(signature.name)
        self.may_read = torch.Tag.dynamic_output_shape in signature.overload.tags
        self._takes_indices = any([is_list for _, is_list in self.tensors])

    def reads(self, values: Sequence[Any]) -> bool:
        """Whether a call with these arguments would end a recording: its result's shape is read.

        Indices say what is chosen by their shape, masks by what they hold.
        """
        return self.may_read and (self.has_masks(values) or not self._takes_indices)

    def has_masks(self, values: Sequence[Any]) -> bool:
        """Whether a call with these arguments chooses as many elements as masks say."""
        if not (self.may_read and self._takes_indices):
            return False
        return any([has_mask(values[place]) for place, is_list in self.tensors if is_list])


@functools.cache
def how_to_run(signature: Signature) -> TorchKernel:
    return TorchKernel(signature)


def run(kernel: TorchKernel, session: OpByOp, args: Sequence[Any], kwargs: dict) -> Any:
    """What the overload returns; raises NeedsRule before anything is changed."""
    recorder = session.recorder
    with recorder.lock:
        if recorder.op_by_op is not session or session.is_over:
            raise NeedsRule  # another thread has ended the recording, or this call is to
        values: Sequence[Any] = args
        if kwargs or len(args) != kernel.count:
            values = kernel.signature.in_schema_order(tuple(args), kwargs)
        # Another thread that was to end it has to look again. Who profiles wants every call here.
        recorder.now = session if spans.timeline is None else None
        operands = _operands(kernel, session, values)
        session.calls += 1
        if kernel.may_read and kernel.reads(values):
            session.note_read()
        if kernel.signature.has_no_result:
            _called(kernel, operands, False)
            session.note_read()  # it looks at values, and raises
            return None
        if kernel.makes_one:
            made = _called(kernel, operands, False)
            if kernel.may_be_operand:
                made = torch.ops.aten.alias(made)
            return wrap(recorder, computed(recorder, made))
        return _with_writes_and_views(kernel, session, values, operands)


def _operands(kernel: TorchKernel, session: OpByOp, values: Any) -> list:
    """The arguments with CPU tensors in place of lazy ones."""
    recorder, operands = session.recorder, list(values)
    for place, is_list in kernel.tensors:
        operand = values[place]
        if is_list:
            operands[place] = _tensors(session, recorder, operand)
        elif operand is not None:
            operands[place] = _tensor(session, recorder, operand)
        if not kernel.any_strides:
            operands[place] = _contiguous(operands[place])
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
    kernel: TorchKernel, session: OpByOp, values: Any, operands: list
) -> Any:
    signature, recorder = kernel.signature, session.recorder
    written = signature.written_by(values) if kernel.writes else ()
    for place in written:
        operands[place] = _own(session, values[place], operands)
    made = _called(kernel, operands, kernel.writes)
    for place in written:
        _hold(session, values[place], operands[place])
    if signature.returns_written:
        return signature.returned(values)
    if signature.is_view:
        return _views(recorder, signature, values, made)
    others = made[len(made) - len(signature.returns) :] if written else made
    return wrap_all(recorder, signature, _all_computed(recorder, others))


def _called(kernel: TorchKernel, operands: list, writes: bool) -> Any:
    if spans.timeline is None:
        return _ran(kernel, operands, writes)
    began = spans.now()
    made = _ran(kernel, operands, writes)
    note_call(kernel.signature.overload, operands, {}, (made,), began)
    return made


def _ran(kernel: TorchKernel, operands: list, writes: bool) -> Any:
    try:
        if not is_plain_now():
            with PlainDispatch():
                return _passed(kernel, operands)
        if not kernel.names:
            return kernel.call(*operands)
        return _passed(kernel, operands)
    except Exception as error:
        if writes and not (isinstance(error, NotImplementedError) and not kernel.writes_lists):
            raise  # some of it may have been written: the rule must not read that
        raise NeedsRule from error


def _passed(kernel: TorchKernel, operands: list) -> Any:
    keywords = zip(kernel.names, operands[kernel.positional :])
    return kernel.call(*operands[: kernel.positional], **dict(keywords))


def _tensor(session: OpByOp, recorder: Recorder, operand: Any) -> Any:
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


def _tensors(session: OpByOp, recorder: Recorder, operands: Any) -> list:
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


def _contiguous(operand: Any) -> Any:
    if operand.__class__ is list:
        return [_contiguous(part) for part in operand]
    return contiguous(operand) if operand.__class__ is torch.Tensor else operand


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _own(session: OpByOp, operand: Any, read: Sequence[Any]) -> Any:
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


def _hold(session: OpByOp, operand: Any, tensor: Any) -> None:
    """The written `operand` has the value that the kernel has left in `tensor`."""
    if isinstance(operand, (list, tuple)):
        for storage, written in zip(map(storage_of, operand), tensor):
            hold(session.recorder, storage.lazy, written)
    elif tensor.size() == operand.size():
        hold(session.recorder, storage_of(operand).lazy, tensor)
    else:  # the kernel has resized it
        operand.data = wrap(session.recorder, computed(session.recorder, tensor))


def hold(recorder: Recorder, state: State, tensor: torch.Tensor) -> None:
    """`state` has the value that a kernel has left in `tensor`."""
    value: Any = state.value
    if value is not None and value.tensor is tensor:
        state.buffer = None  # whoever else sees it has been told: see OpByOp.own
    else:
        write(state, computed(recorder, tensor))


def _views(recorder: Recorder, signature: Signature, values: Any, made: Any) -> Any:
    parts = _all_computed(recorder, made)
    links = links_of(signature, link_of(signature, values, made), len(parts))
    return link_all(recorder, signature, storage_of(values[0]).lazy, parts, links)


def _all_computed(recorder: Recorder, made: Any) -> list:
    """The value of the tensor that a kernel has made; of several, each; None of an undefined one."""
    several = (made,) if isinstance(made, torch.Tensor) else made
    return [one if one is None else computed(recorder, one) for one in several]


def link_of(signature: Signature, values: Any, made: Any) -> tuple:
    """How the views that a call has made are derived from what they show."""
    arguments, source = signature.arguments, values[0]
    positional = [v for v, a in zip(values, arguments) if not a.keyword_only]
    keywords = {a.name: v for v, a in zip(values, arguments) if a.keyword_only and v is not None}
    shape = made.shape if isinstance(made, torch.Tensor) else source.shape
    return link_by(signature.overload, tuple(positional[1:]), keywords, source.shape, shape)
