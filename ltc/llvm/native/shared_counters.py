"""Counters in memory that several processes share, each written by one of them.

A store is a release: a process that reads the new value by an acquire sees all earlier writes. A wait
first spins, since a running peer arrives soon, and then sleeps. It never yields: a yield would give the
processor to another program for a whole time slice. A process that wakes from sleep runs before
programs that have been computing meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit.builder import ATTRIBUTES
from ltc.llvm.native import futex
from ltc.llvm.native.named_blocks import NamedBlocks
from ltc.llvm.native.system import has_futex

SPINS = 1000  # looks of a wait before it sleeps: about 15 us, some times what a message takes
_FUNCTIONS = ("counter.load", "counter.store", "counter.wait")
_SLEEP_SECONDS = 5e-5  # where the system has no futex


def _load() -> str:
    f = NamedBlocks("i64 @counter.load(ptr %counter)")
    f.block("start")
    f.give(f"i64 {f.load('value', '%counter', 'acquire')}")
    return f.text()


def _store() -> str:
    f = NamedBlocks("void @counter.store(ptr %counter, i64 %value)")
    f.block("start")
    f.store("%value", "%counter", "release")
    if has_futex():
        futex.wake_shared(f, "%counter", futex.ALL)
    f.give()
    return f.text()


def _wait() -> str:
    """The counter once it is as large, or when the sleep is over, which anything may end early.

    nap  the longest sleep: the address of its seconds and nanoseconds
    """
    f = NamedBlocks("i64 @counter.wait(ptr %counter, i64 %value, ptr %nap)")
    f.block("start")
    f.go("look")
    f.block("look")
    spins = f.let("spins", "phi i64 [ 0, %start ], [ %spins.more, %again ]")
    seen = f.load("seen", "%counter", "acquire")
    f.choose(f"sge i64 {seen}, %value", "end", "again")
    f.block("again")
    f.emit(futex.pause_text()[1])
    more = f.let("spins.more", f"add i64 {spins}, 1")
    f.choose(f"ugt i64 {more}, {SPINS}", "sleep", "look")
    f.block("sleep")
    if has_futex():
        futex.wait_shared(f, "%counter", f"i64 {seen}", "%nap")
    f.give(f"i64 {f.load('after', '%counter', 'acquire')}")
    f.block("end")
    f.give(f"i64 {seen}")
    return f.text()


def text() -> str:
    declared = f"{futex.DECLARED}{futex.pause_text()[0]}\n"
    return "".join((declared, _load(), _store(), _wait(), ATTRIBUTES))


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Functions(NamedTuple):
    load: Callable[..., Any]  # with the GIL held: shorter than letting it go
    store: Callable[..., Any]
    wait: Callable[..., Any]


@functools.cache
def _functions() -> _Functions:
    addresses = llvm_binding.compile_kernels(text(), *_FUNCTIONS)
    word, counter = ctypes.c_int64, ctypes.c_void_p
    return _Functions(
        ctypes.PYFUNCTYPE(word, counter)(addresses["counter.load"]),
        ctypes.PYFUNCTYPE(None, counter, word)(addresses["counter.store"]),
        ctypes.CFUNCTYPE(word, counter, word, counter)(addresses["counter.wait"]),
    )


def load(address: int) -> int:
    """The counter; what was written before it was stored is seen from now on."""
    return _functions().load(address)


def store(address: int, value: int) -> None:
    """Give the counter a value, and wake the threads that sleep until it changes."""
    _functions().store(address, value)


class Sleeper:
    """Waits for counters.

    Args:
        nap_seconds: The longest that one wait sleeps.
    """

    def __init__(self, nap_seconds: float) -> None:
        seconds, rest = divmod(nap_seconds, 1)
        self._nap = _TimeSpec(int(seconds), int(rest * 1e9))
        self._nap_address = ctypes.addressof(self._nap)

    def wait(self, address: int, value: int) -> int:
        """The counter, once it is at least `value` or some time has passed; the GIL is free."""
        seen: int = _functions().wait(address, value, self._nap_address)
        if seen < value and not has_futex():
            time.sleep(_SLEEP_SECONDS)
        return seen
