"""Memory that the replicas of one host share: a mailbox for each ordered pair, and a board.

The layout of a region of n replicas, all words 64 bits, each written by one replica only:
- the abort report: a flag, a length, and the text that every replica raises once one has found a
  fault; between them a number that all have agreed upon
- for each replica two counters, a cache line each: of the sums whose operands are there, and of
  those of which it needs no operand any more
- n board entries: how many collectives the replica has begun, whether it is inside one, its
  process, whom it has been waiting for long, whether it has returned, and a line saying which
- n * n mailboxes, first by receiver: how many messages were put in, how many were taken out (a cache
  line each), then SLOTS slots of a header (the caller's tag, bytes) and the message itself

Nothing here needs an atomic operation: a counter is stored after what it announces, and read before.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from ltc.distributed.transport.private_folder import reserve, shared_file

LANES = 2  # regions of a run: of what programs exchange, and of what is exchanged at once
SLOTS = 4
LINE = 64  # bytes of a cache line: two writers never share one
_REPORT_BYTES = 1 << 16
_AGREED = 2  # index of a word of the abort report's line
_ENTRY_BYTES = 1024
_SUM_BYTES = 2 * LINE
_TEXT_BYTES = _ENTRY_BYTES - LINE
_COUNTERS = 4 * LINE
_SLOT_HEADER = LINE
_MOST_SLOT_BYTES, _LEAST_SLOT_BYTES = 512 << 10, 4 << 10
_MOST_REGION_BYTES = 256 << 20

# Looks at a word before sleeping: what a peer on another core needs.  The first ones, some 10 us,
# hold the GIL; the rest, about 100 us, let other threads and processes have the core.
LOOKS, YIELDS = 200, 150
NAP_SECONDS = 0.02  # a sleeper looks this often whether somebody has found a fault


class PeerFailure(RuntimeError):
    """A collective that cannot end: replicas disagree, one is absent, or one has failed.

    Every replica of the region raises the same text.
    """


def slot_bytes(replicas: int) -> int:
    """Bytes of the largest message between two of `replicas`."""
    share = _MOST_REGION_BYTES // (replicas * replicas * SLOTS)
    return max(min(share, _MOST_SLOT_BYTES) // LINE * LINE, _LEAST_SLOT_BYTES)


def region_bytes(replicas: int) -> int:
    mailbox = _COUNTERS + SLOTS * (_SLOT_HEADER + slot_bytes(replicas))
    return _first_mailbox(replicas) + replicas * replicas * mailbox


def _first_mailbox(replicas: int) -> int:
    return _REPORT_BYTES + replicas * (_SUM_BYTES + _ENTRY_BYTES)


class Region:
    """The shared memory itself, as one replica or many of this process use it.

    memory    a writable mapping of `region_bytes(replicas)` zeros, shared with the others
    file      its descriptor, or -1 where the replicas are threads of this process
    """

    def __init__(self, replicas: int, memory: mmap.mmap, file: int = -1) -> None:
        self.replicas, self.memory, self.file = replicas, memory, file
        self.words = memoryview(memory).cast("q")
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self.slot_bytes = slot_bytes(replicas)
        self._mailbox_bytes = _COUNTERS + SLOTS * (_SLOT_HEADER + self.slot_bytes)
        self._lock = threading.Lock()
        self.symmetric_memory: Any = None  # for operands of one-shot sums: see symmetric_memory.py
        self.thread_messages: dict[int, deque] = {}  # by mailbox: see ThreadsWire

    @classmethod
    def of_threads(cls, replicas: int) -> Region:
        return cls(replicas, mmap.mmap(-1, region_bytes(replicas)))

    @classmethod
    def of_processes(cls, replicas: int, path: str) -> Region:
        """The region in the file `path`, made by whichever process comes first."""
        size = region_bytes(replicas)
        file = shared_file(path, size)
        reserve(file, 0, _first_mailbox(replicas))
        return cls(replicas, mmap.mmap(file, size), file)

    def reserve_counters(self, mailbox: int) -> None:
        """Before any of the mailbox is read.  Raises LtcError where there is no room for it."""
        if self.file >= 0:
            reserve(self.file, mailbox, _COUNTERS)

    def reserve_slots(self, mailbox: int) -> None:
        """Before the first message is put in.  Raises LtcError where there is no room for it."""
        if self.file >= 0:
            reserve(self.file, mailbox, self._mailbox_bytes)

    # --- mailboxes

    def mailbox(self, sender: int, receiver: int) -> int:
        """Offset, in bytes, of the mailbox from one replica to another."""
        place = receiver * self.replicas + sender
        return _first_mailbox(self.replicas) + place * self._mailbox_bytes

    def slot(self, mailbox: int, message: int) -> int:
        """Offset of the header of the slot that holds message number `message`."""
        return mailbox + _COUNTERS + message % SLOTS * (_SLOT_HEADER + self.slot_bytes)

    # --- one-shot sums

    def published(self, replica: int) -> int:
        """Offset of the counter of the one-shot sums whose operands a replica has written."""
        entries = _REPORT_BYTES + self.replicas * _ENTRY_BYTES
        return entries + replica * _SUM_BYTES

    def released(self, replica: int) -> int:
        """Offset of the counter of the one-shot sums of which a replica needs nothing any more."""
        return self.published(replica) + LINE

    def agreed(self, value: int) -> int:
        """The number that whoever calls this first proposes; it is not 0."""
        with self._alone():
            if not self.words[_AGREED]:
                self.words[_AGREED] = value
            return self.words[_AGREED]

    # --- the board

    def begin(self, replica: int, count: int, text: bytes) -> None:
        """Say that `replica` is inside its collective number `count`."""
        at = _REPORT_BYTES + replica * _ENTRY_BYTES
        text = text[:_TEXT_BYTES]
        self.memory[at + LINE : at + LINE + len(text)] = text
        struct.pack_into("qqqq", self.memory, at, count, 1, os.getpid(), len(text))

    def end(self, replica: int) -> None:
        self.words[(_REPORT_BYTES + replica * _ENTRY_BYTES) // 8 + 1] = 0

    def entry(self, replica: int) -> tuple[int, bool, int, str]:
        """(collectives begun, whether inside one, process, the line) of a replica."""
        at = _REPORT_BYTES + replica * _ENTRY_BYTES
        count, inside, process, length = struct.unpack_from("qqqq", self.memory, at)
        text = bytes(self.memory[at + LINE : at + LINE + length]).decode(errors="replace")
        return count, bool(inside), process, text

    def waiting_word(self, replica: int) -> int:
        """Index of the word saying for whom `replica` has been waiting long: 0, or 1 + ordinal.

        Two words follow: the offset of the counter it looks at, and the value that it waits for.
        """
        return (_REPORT_BYTES + replica * _ENTRY_BYTES) // 8 + 4

    def say_waiting(self, replica: int, peer: int, offset: int, value: int) -> None:
        """Say that `replica` has waited long for `peer` to bring a counter to a value."""
        at = self.waiting_word(replica)
        self.words[at + 1], self.words[at + 2] = offset, value
        self.words[at] = peer + 1

    def waits_for(self, replica: int) -> int | None:
        """Whom a replica has been waiting for so long that it said so.

        None where what it waits for is there: it has only had no processor since.
        """
        at = self.waiting_word(replica)
        word, offset, value = self.words[at : at + 3]
        return word - 1 if word and self.words[offset // 8] < value else None

    def say_returned(self, replica: int, returned: bool) -> None:
        """Say whether the function of `replica` is over, and with it all that it exchanges."""
        self.words[self.waiting_word(replica) + 3] = returned

    def has_returned(self, replica: int) -> bool:
        return bool(self.words[self.waiting_word(replica) + 3])

    # --- the abort report

    @property
    def failed(self) -> bool:
        return self.words[0] != 0

    def fail(self, text: str) -> None:
        """Make `text` the abort report, unless there is one already."""
        encoded = text.encode()[: _REPORT_BYTES - LINE]
        with self._alone():
            if self.failed:
                return
            self.memory[LINE : LINE + len(encoded)] = encoded
            self.words[1] = len(encoded)
            self.words[0] = 1  # last: readers look here first

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One replica at a time, of this process or another."""
        with self._lock:
            if self.file >= 0:
                fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                if self.file >= 0:
                    fcntl.lockf(self.file, fcntl.LOCK_UN)

    def raise_abort_report(self) -> None:
        """Raise PeerFailure with the abort report's text where there is one."""
        if self.failed:
            text = bytes(self.memory[LINE : LINE + self.words[1]])
            raise PeerFailure(text.decode(errors="replace"))

    # --- waiting

    def store(self, offset: int, value: int) -> None:
        """Store a counter and wake whoever sleeps until it changes."""
        self.words[offset // 8] = value
        _wake(self.address + offset)

    def wait_at_least(self, offset: int, value: int, who_is_late) -> None:
        """Block until the counter at `offset` has reached `value`; the GIL is free meanwhile.

        who_is_late  called with the seconds waited so far, now and then; it may report
        Raises PeerFailure as soon as there is an abort report.
        """
        words, index = self.words, offset // 8
        for _ in range(LOOKS):
            if words[index] >= value:
                return
        for _ in range(YIELDS):
            if words[index] >= value:
                return
            _yield()
        started = time.monotonic()
        while (seen := words[index]) < value:
            self.raise_abort_report()
            who_is_late(time.monotonic() - started)
            _sleep(self.address + offset, seen)


# --- sleeping until a word changes ------------------------------------------------------------
# A call through ctypes releases the GIL, which os.sched_yield does not.

_libc = ctypes.CDLL(None, use_errno=False)
_yield = _libc.sched_yield
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = None
if sys.platform == "linux":
    _SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine)


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_nap = _TimeSpec(0, int(NAP_SECONDS * 1e9))
_nap_pointer = ctypes.byref(_nap)
_syscall = _libc.syscall
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
]


def _sleep(address: int, seen: int) -> None:
    """Sleep until the word at `address` is no longer `seen`, at most NAP_SECONDS."""
    if _SYS_FUTEX is None:
        time.sleep(5e-5)
        return
    low = ctypes.c_int32(seen).value  # a futex is 32 bits: the low half, on little-endian machines
    _syscall(_SYS_FUTEX, address, _FUTEX_WAIT, low, _nap_pointer, None, 0)


def _wake(address: int) -> None:
    if _SYS_FUTEX is not None:
        _syscall(_SYS_FUTEX, address, _FUTEX_WAKE, 1 << 30, None, None, 0)
