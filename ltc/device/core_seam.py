"""The questions that the core and Python ask each other.

A tensor's value is in one place: in its State, or in the core.  The core borrows the values of its
operands; Python takes a value back, with all that lie in its memory, where it asks a State for it.
"""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from time import time
from typing import Any

import torch

from ltc.aten.schema import overload_named
from ltc.aten.wide_sums import adds_in_16_bits
from ltc.backends.kernel_call import takes_memory_as_it_lies
from ltc.backends.plain_dispatch import PlainDispatch, is_plain_now
from ltc.device.call_observer import watching
from ltc.device.hooks import strided_copies
from ltc.device.immediate.computed import computed
from ltc.device.immediate.immediate_session import STEPS, ImmediateSession, sessions
from ltc.device.ops import copies, quick_copies, storages
from ltc.device.recording import gradient_views
from ltc.device.recording import state as states
from ltc.device.recording.core_links import link_of, told_of
from ltc.device.recording.recorder import device_at
from ltc.device.recording.run_now import how_to_run
from ltc.device.recording.signature import (
    ATTRIBUTE,
    DEVICE,
    GENERATOR,
    IGNORED,
    NUMBER,
    NUMBERS,
    OPTIONAL_TENSOR,
    OPTIONAL_TENSORS,
    TENSOR,
    TENSORS,
    Signature,
)
from ltc.device.recording.slow_path import is_forced
from ltc.device.recording.state import State, is_second, new_state
from ltc.device.recording.sync import begin_for_core, end_at_read, passes_read
from ltc.device.recording.tensors import DOWNLOADS, UPLOADS
from ltc.device.recording.tracks import REFUSED, host_of, is_plain, may_be_lent
from ltc.device.torch_device import storage_of
from ltc.device.versions import are_counted_here
from ltc.explaining.no_sync import reads_are_forbidden
from ltc.native.core import Core
from ltc.runtime.account import account_of
from ltc.runtime.buffer import Buffer, input_key
from ltc.support.observation import metrics
from ltc.support.process.fork_safe_lock import renewed_lock
from ltc.support.process.held_signals import held
from ltc.support.torch_private import storage_identity

# Copies and storages have kernels of Python's own; a value of the core's is never conjugated or negated.
_NOT_THERE = frozenset(
    f"aten::{name}"
    for name in (*copies.KERNELS, *storages.KERNELS, "_conj", "_neg_view", "view.dtype")
)
_library: torch.library.Library | None = None

# --- what the core asks ---------------------------------------------------------------------------


class CoreRule(enum.IntFlag):
    """The facts of an overload by which the core runs its calls: as in `Rule` of overload.h."""

    RUNS_HERE = 1
    ANY_STRIDES = 2
    ZEROED = 4
    COUNTS_WRITES = 8
    NOT_16_BITS = 16
    MAY_READ = 32
    IS_EXPAND = 64
    COPIES = 128
    ATTENTION = 256
    ADAM = 512
    AS_IT_LIES = 1024
    OF_DEVICE = 2048
    DRAWS = 4096
    FROM_START = 8192
    BY_PROGRAM = 16384


# What the core runs by itself, though Python has kernels of its own for it, or leaves it to its rule.
_ITS_OWN = {
    "aten::_to_copy": CoreRule.RUNS_HERE | CoreRule.ANY_STRIDES | CoreRule.COPIES,
    "aten::empty.memory_format": CoreRule.RUNS_HERE | CoreRule.ZEROED,
    "aten::new_empty_strided": CoreRule.RUNS_HERE | CoreRule.ANY_STRIDES | CoreRule.ZEROED,
    "aten::as_strided": CoreRule.RUNS_HERE | CoreRule.FROM_START,
    "aten::equal": CoreRule.RUNS_HERE
    | CoreRule.ANY_STRIDES
    | CoreRule.MAY_READ
    | CoreRule.OF_DEVICE,
    "aten::copy_": CoreRule.RUNS_HERE | CoreRule.ANY_STRIDES | CoreRule.OF_DEVICE,
}
# Random numbers that the core draws: those that are not rounded more than once, and those that only
# PyTorch's kernels make. See random.cpp.
_DRAWN = frozenset(
    f"aten::{name}"
    for name in (
        "native_dropout", "bernoulli", "bernoulli_.float", "uniform_", "rand", "randint",
        "randint.low", "random_.to", "random_.from", "multinomial", "poisson",
    )
)  # fmt: skip
# Those that round more than once: the core launches the program that Python has drawn them by before.
_DRAWN_BY_PROGRAMS = frozenset(
    f"aten::{name}"
    for name in ("randn", "randn_like", "normal_", "normal.float_float", "exponential_")
)


def _rule(name: str) -> int:
    """Return the CoreRule of an overload."""
    signature = Signature(overload_named(name))
    kernel = how_to_run(signature)
    tags = signature.overload.tags
    if is_forced(signature):
        return 0
    if name in _ITS_OWN:
        return _ITS_OWN[name]
    if name in _DRAWN:
        return CoreRule.RUNS_HERE | CoreRule.ANY_STRIDES | CoreRule.DRAWS
    if name in _DRAWN_BY_PROGRAMS:
        draws = CoreRule.DRAWS | CoreRule.BY_PROGRAM
        return CoreRule.RUNS_HERE | CoreRule.ANY_STRIDES | draws
    if name in _NOT_THERE or not kernel.runs_here or torch.Tag.inplace_view in tags:
        return 0
    facts = {
        CoreRule.RUNS_HERE: True,
        CoreRule.ANY_STRIDES: kernel.any_strides,
        CoreRule.ZEROED: name.startswith(("aten::empty", "aten::new_empty")),
        CoreRule.COUNTS_WRITES: are_counted_here(signature),
        CoreRule.NOT_16_BITS: adds_in_16_bits(name),
        CoreRule.MAY_READ: kernel.may_read,
        CoreRule.IS_EXPAND: name == "aten::expand",
        CoreRule.ATTENTION: name in ("ltc::attention", "ltc::attention_gradient"),
        CoreRule.ADAM: name == "ltc::adam_",
        CoreRule.AS_IT_LIES: takes_memory_as_it_lies(name),
    }
    return sum(fact for fact, holds in facts.items() if holds)


def _note_uploads() -> None:
    with metrics.up_to_date():
        pass


def _lend(tensor: torch.Tensor, number: int) -> torch.Tensor | None:
    """Return the value of a tensor, which the core has from now on; None where it stays here.

    None as well of a view: the core derives its value from that of its base.
    """
    try:
        state: State = storage_of(tensor).lazy
    except AttributeError:
        return None  # nothing was ever asked of it
    session = sessions.get(get_ident())
    if session is None or is_second(tensor):
        return None
    if state.base is not None:
        _join(tensor, state, number, session)
        return None
    host = _let_go(state, storage_of(tensor), session)
    if host is not None:
        _have_in_core(state, number)
    return host


def _lend_view(tensor: torch.Tensor, number: int) -> bool:
    """The core has a view from before the recording, and its base, of which nothing is recorded; False if not."""
    try:
        state: State = storage_of(tensor).lazy
    except AttributeError:
        return False
    base = state.base
    if base is None or is_second(tensor) or state.value is not None:
        return False
    if not base.is_in_core and base.value is not None:
        return False
    _join(tensor, state, number, None)
    return state.is_in_core


def _let_go(base: State, storage: Any, session: ImmediateSession | None) -> torch.Tensor | None:
    """Return the value of a state that is no view, whose views are derived again where they are next used.

    None where it, or one of these, is to stay here.
    """
    host = _host_of(base, session)
    if host is None:
        return None
    views = base.living_views()
    if views and (gradient_views.running or not host.is_contiguous()):
        return None  # in a backward, some are to be independent when it ends
    recorder = None if session is None else session.recorder
    if any([v.buffer or (v.value and v.value.recorder is not recorder) for v in views]):
        return None
    for view in views:
        view.value, view.base_storage = None, storage
    if not views:
        base.views = None
    return host


def _host_of(state: State, session: ImmediateSession | None) -> torch.Tensor | None:
    """Return the value of a state that is no view, as the core takes it; None where it does not."""
    value, buffer = state.value, state.buffer
    if session is None:
        host = None if value is not None else host_of(buffer)
        return host.clone() if host is not None and buffer.shared else host  # type: ignore[union-attr]
    if value is None:
        host = host_of(buffer)
    else:
        is_here = value.recorder is session.recorder and hasattr(value, "tensor")
        host = value.tensor if is_here and may_be_lent(value.tensor) else None
    return host if host is None or session.owns(buffer) else host.clone()


def _join(tensor: torch.Tensor, view: State, number: int, session: ImmediateSession | None) -> None:
    """The core has a view from now on if it can have the view's base.

    Args:
        session: The session in which calls run at once; None where nothing of the two is recorded.
    """
    base: Any = view.base
    if gradient_views.running:
        return  # it may have to be independent when the backward ends
    links = tuple([told_of(*link) for link in view.chain])
    if None in links or not is_plain_now():
        return
    if not base.is_in_core and not _hold(base, session):
        return
    if torch.ops.ltc_core.join(tensor, base.number_in_core, links):
        _have_in_core(view, number)


def _hold(base: State, session: ImmediateSession | None) -> bool:
    """Give the core the value of a view's base; return False where Python keeps it."""
    if not hasattr(base, "number_in_core") or not (base.value or base.buffer):
        return False
    shown = torch.ops.ltc_core.numbered(base.number_in_core)
    if shown is None:  # the base's own tensor is gone: its views share a new storage
        shown = base.device.new_tensor(*base.type)
        storage_of(shown).lazy = base
    host = _let_go(base, storage_of(shown), session) if shown is not False else None
    if host is None:
        return False
    _have_in_core(base, torch.ops.ltc_core.hold(shown, host))
    return True


def _have_in_core(state: State, number: int) -> None:
    state.number_in_core = number
    del state.value, state.buffer


def _lend_to_walk(tensor: torch.Tensor, number: int) -> torch.Tensor | None:
    walk = device_at(0).recorder().walk
    return None if walk is None else walk.lend(tensor, number)


def _may_look() -> bool:
    """Return True if a call may look at values; the read is noted then."""
    session = sessions.get(get_ident())
    if session is None or reads_are_forbidden():
        return False
    session.note_read()
    return True


def _may_read(host: torch.Tensor, is_number: bool) -> bool:
    """Return True if a value that is there may be read at once; it is noted then.

    A copy to the CPU is left to Python's kernel where the read ends the recording.
    """
    held.deliver()
    session = sessions.get(get_ident())
    if session is None or watching or reads_are_forbidden():
        return False
    value = computed(session.recorder, host)
    if is_number:
        quick_copies.note_read(session, value)
    elif passes_read(value, session):
        DOWNLOADS.happened(0, host.nbytes)
    else:
        return False
    return True


def _reads(core: Core, of_numbers: bool) -> list[tuple[float, ...]]:
    """Return the reads that are not reported yet, as metrics have them: moment, seconds, bytes."""
    count, nbytes = core.reads(of_numbers)
    return [(time(), 0, nbytes / count)] * count if count else []


def _steps_passed() -> list[tuple[float, ...]]:
    """Return the steps of this thread that are not reported yet; each session reports its own."""
    session = sessions.get(get_ident())
    return [] if session is None else [(time(), *steps) for steps in session.steps_passed()]


_LETTERS = {
    TENSOR: "t", OPTIONAL_TENSOR: "t", TENSORS: "T", OPTIONAL_TENSORS: "T", NUMBER: "n", NUMBERS: "N",
    ATTRIBUTE: "a", DEVICE: "d", GENERATOR: "g", IGNORED: "i",
}  # fmt: skip


def _words(name: str) -> str:
    """Return how an overload's arguments are recorded: see `ask_for_words` in python_side.h."""
    signature = Signature(overload_named(name))
    words = ["draws" if signature.random else "plain"]
    for place, argument in enumerate(signature.arguments):
        is_static = argument.kind == NUMBER and argument.static is None
        statics = ",".join([repr(float(one)) for one in argument.static or ()])
        letter = "a" if is_static else _LETTERS[argument.kind]
        words.append(("f" if letter == "n" and place in signature.converted else letter) + statics)
    return " ".join(words)


def _may_learn() -> bool:
    learner = device_at(0).recorder().learner
    return learner is not None and learner.may_learn()


def _learned_values(*noted: Any) -> list[int]:
    learner = device_at(0).recorder().learner
    return [REFUSED] if learner is None else learner.learned_values(*noted)


def _open(tensors: Any, numbers: Any) -> bool:
    walk = device_at(0).recorder().walk
    return walk is not None and walk.open(tensors, numbers)


def _draw() -> int:
    return device_at(0).random.draw()


def _undraw() -> None:
    device_at(0).random.undraw()


def _program_drawn() -> list[int]:
    """Return how the program is launched by which the thread's last call has drawn; see python_side.h."""
    session = sessions.get(get_ident())
    return [] if session is None else session.words_of_last_draw()


def _catch_up() -> None:
    device_at(0).recorder().catch_up()


def _look() -> None:
    session = sessions.get(get_ident())
    if session is not None:
        session.forget_dead()


# --- what Python takes ----------------------------------------------------------------------------


# Of two threads that ask for a value, the second waits until the first one's states have it.
_taking = renewed_lock(globals(), "_taking")


def _plain_dispatch() -> AbstractContextManager[None]:
    """The core is asked for values, not the mode of a tracer that looks at a tensor."""
    return nullcontext() if is_plain_now() else PlainDispatch()


def _take_of(state: State) -> None:
    """Take the value of a state that has none."""
    with _taking, _plain_dispatch():
        members = torch.ops.ltc_core.take_numbered(state.number_in_core)
        if not members and not state.is_in_core:
            return  # another thread has taken it, or a walk has ended
        if not members:
            raise RuntimeError("a tensor's value was asked for, but nothing holds it")
        _adopt(members)


class _State:
    """The attribute `lazy` of a storage that the core made, until it is first read.

    It is looked up in the storage's class where the storage has none of its own.
    """

    def __get__(self, storage: Any, kind: Any = None) -> State:
        if storage is None:
            return self  # type: ignore[return-value]
        with _taking, _plain_dispatch():
            members = torch.ops.ltc_core.take(storage_identity(storage))
            if members:
                _adopt(members)
            elif "lazy" not in vars(storage):  # no other thread has taken it, and no walk has ended
                raise AttributeError("lazy")
            return vars(storage)["lazy"]


def _adopt(members: Any) -> None:
    """States get the values that the core had: those of the thread's session, if there is one."""
    device = device_at(0)
    session = sessions.get(get_ident())
    if session is not None and (session.recorder.now is not session or session.notes is not None):
        session = None
    adopted: list[State] = []
    for tensor, host, place, links, number, is_watched in members:
        storage = storage_of(tensor)
        state = vars(storage).get("lazy")
        if state is None:
            state = storage.lazy = new_state(None, device)
        state.value = state.buffer = None
        state.number_in_core = number
        if place >= 0:
            base = adopted[place]
            state.base, state.chain = base, tuple([link_of(*link) for link in links])
            if state.views is None or state.views is not base.views:
                base.add_view(state)
        if is_watched:
            gradient_views.watch_again(state)
        adopted.append(state)
        if session is not None:
            state.value = computed(session.recorder, host)
            session.recorder.live.append(state)
    if session is None:
        for (_, host, place, *_), state in zip(members, adopted):
            if place < 0:
                state.buffer = _buffer(host, len(members) == 1)


def _buffer(host: torch.Tensor, is_alone: bool) -> Buffer:
    if not (is_alone and host.is_contiguous() and host.untyped_storage().nbytes() == host.nbytes):
        host = host.clone(memory_format=torch.contiguous_format)
    return Buffer(input_key(tuple(host.shape), host.dtype), 0, host)


def install(core: Core) -> None:
    """Connect the two; the kernels of Python are registered by then."""
    global _library
    core.define()
    _library = torch.library.Library("ltc_core", "FRAGMENT")
    for schema, answer in {
        "rule(str overload) -> int": _rule,
        "lend(Tensor tensor, int number) -> Tensor?": _lend,
        "lend_to_walk(Tensor tensor, int number) -> Tensor?": _lend_to_walk,
        "lend_view(Tensor tensor, int number) -> bool": _lend_view,
        "end_at_read(bool is_number) -> bool": end_at_read,
        "may_look() -> bool": _may_look,
        "look() -> ()": _look,
        "note_uploads() -> ()": _note_uploads,
        "words(str overload) -> str": _words,
        "may_learn() -> bool": _may_learn,
        "learned_values(Tensor[] tensors, Any numbers, int operands, int made, int inputs, bool is_view)"
        " -> int[]": _learned_values,
        "is_plain(Tensor tensor) -> bool": is_plain,
        "open(Tensor[] tensors, int[] numbers) -> bool": _open,
        "draw() -> int": _draw,
        "undraw() -> ()": _undraw,
        "program_drawn() -> int[]": _program_drawn,
        "copies(Tensor tensor, int[] sizes) -> bool": strided_copies.reshapes_by_copy,
        "catch_up() -> ()": _catch_up,
        "begin() -> ()": begin_for_core,
        "may_read(Tensor value, bool is_number) -> bool": _may_read,
    }.items():
        _library.impl(_library.define(schema), answer, "CPU")
    states.take = _take_of
    account_of(0).elsewhere = core.bytes
    quick_copies.NUMBERS.elsewhere = lambda: _reads(core, True)
    DOWNLOADS.elsewhere = lambda: _reads(core, False)
    STEPS.elsewhere = _steps_passed
    UPLOADS.elsewhere = lambda: [(moment, t, t, n) for moment, t, n in core.uploads()]
    torch.UntypedStorage.lazy = _State()  # type: ignore[attr-defined]
    core.register()
