"""Views: a state derived from a base, and writes that go through to it.

A write through a view is a functional update of the base; every other view of that base becomes
stale and is derived again when read.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ltc.aten.call import Call, CallResult
from ltc.aten.value_views import changes_values
from ltc.backends.plain_dispatch import is_plain_now
from ltc.device.immediate.computed import ComputedValue
from ltc.device.immediate.notes import written_key
from ltc.device.recording import gradient_views
from ltc.device.recording.recorder import Recorder
from ltc.device.recording.signature import Signature
from ltc.device.recording.state import State, is_second
from ltc.device.recording.strides import REFUSAL, overlaps
from ltc.device.recording.sync import value_of
from ltc.device.symbolic.derive import WRITE_VIEW
from ltc.device.torch_device import storage_of
from ltc.device.user_line import user_line
from ltc.native.core import CORE
from ltc.support.torch_private import is_view_replay_enabled, set_view_replay_enabled

aten = torch.ops.aten
is_inference_mode_enabled = torch.is_inference_mode_enabled


def link_by(
    overload: Any, args: tuple, kwargs: dict, source: Sequence[int], made: Sequence[int]
) -> tuple:
    """(overload, arguments, keywords) by which a view of shape `made` follows from its source."""
    if overload is aten.expand.default and prod(made) == prod(source):
        # No element is there twice, so it may be written to.
        return aten.view.default, (tuple(made),), {}
    return overload, args, kwargs


def link_view(
    recorder: Recorder, viewed: torch.Tensor, value: CallResult, link: tuple
) -> torch.Tensor:
    """A tensor that is a view of `viewed`: `value` now, `link` applied to it ever after."""
    # Without replay autograd would use as_strided, of which always-contiguous tensors know nothing.
    # C++ is asked each time: a flag set inside a backward is undone by the engine.
    if not is_view_replay_enabled():
        set_view_replay_enabled(True)
    # what has been computed would ask its tensor, twice
    typed: Any = value.tensor if value.__class__ is ComputedValue else value
    if is_inference_mode_enabled():
        # a view of a tensor that counts its versions counts with it, so it is an ordinary one too
        with torch.inference_mode(False):
            tensor = recorder.new_tensor(typed.shape, typed.dtype)
    else:
        tensor = recorder.new_tensor(typed.shape, typed.dtype)
    storage_of(tensor).lazy = state = State()
    state.value, state.device, state.buffer = value, recorder.device, None
    of: State = storage_of(viewed).lazy
    if of.base is None:
        state.base, state.chain = of, (link,)
        if CORE is not None and not hasattr(of, "number_in_core"):
            _number(of, viewed)
    else:
        state.base, state.chain = of.base, (*of.chain, link)
    of.add_view(state)
    recorder.live.append(state)
    if gradient_views.running:
        gradient_views.watch(state)
    return tensor


def _number(state: State, tensor: torch.Tensor) -> None:
    """Let the core find the base of a view, should it be given the view alone."""
    if is_plain_now() and not is_second(tensor):
        number = torch.ops.ltc_core.number(tensor)
        if number:
            state.number_in_core = number


def link_views(
    recorder: Recorder, viewed: torch.Tensor, values: Sequence[CallResult], links: list[tuple]
) -> list[torch.Tensor]:
    """All that one call makes of `viewed`, as `unbind` does."""
    return [link_view(recorder, viewed, value, link) for value, link in zip(values, links)]


def links_of(signature: Signature, link: tuple, count: int) -> Any:
    """Return the link of the view that a call makes; of `count` views, a list of links."""
    if signature.returns == ("Tensor",):
        return (*link, None)
    return [(*link, index) for index in range(count)]


def link_all(
    recorder: Recorder,
    signature: Signature,
    viewed: torch.Tensor,
    values: Sequence[CallResult],
    links: Any,
) -> Any:
    """Return the views of a call: a tensor or a list; `links` as `links_of` gives them."""
    if signature.returns == ("Tensor",):
        return link_view(recorder, viewed, values[0], links)
    return link_views(recorder, viewed, values, links)


def write(state: State, value: CallResult) -> None:
    """`state` holds `value` from now on, and so does the part of its base that it shows."""
    if state.value is None:
        value.recorder.live.append(state)  # so that the end of the recording finds it
    if state.views is None:
        state.value, state.buffer = value, None
        return
    if state.base is not None:
        _write_base(state, value)
        state.value = value
        return
    for view in state.living_views():
        view.value = None
    state.value, state.buffer = value, None


def _write_base(state: State, value: CallResult) -> None:
    if state.is_expanded and (overlaps(state) or _changes_values(state.chain)):
        if not gradient_views.accumulates():
            raise RuntimeError(REFUSAL)
        state.leave_base()  # a gradient that a hook has made, of which the CPU takes a copy
        state.value, state.buffer = value, None
        return
    base: Any = state.base
    chain, recorder = state.chain, value.recorder
    old = value_of(base)
    if recorder.immediate is not None:
        state.value = None  # it lies in the base's memory, which may then be written to
        write(base, recorder.immediate.with_written(base, old, value, chain))
        return
    key = written_key(old, value, chain)

    def make_call() -> Call:
        call = Call(WRITE_VIEW, (old, value, chain), {}, line=user_line())
        recorder.values(call, [(old.shape, old.dtype)])
        return call

    write(base, recorder.advance(key, make_call).value)


def _changes_values(chain: tuple) -> bool:
    """Return True if a view behind an expansion holds other numbers: no position locates them."""
    names = [link[0] for link in chain]
    return any(map(changes_values, names[names.index(aten.expand.default) :]))
