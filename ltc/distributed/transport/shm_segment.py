"""Memory that the replicas of one host share: a mailbox for each ordered pair, a board, and parts.

The layout of a region of n replicas, all words 64 bits, each written by one replica only:
- the abort report: a flag, a length, and the text that every replica raises once one has found a
  fault; between them a number that all have agreed upon
- for each replica two counters, a cache line each: of the sums with all operands written, and of the
  sums of which it needs no operand any more
- n board entries: the number of collectives that the replica has begun, a flag if it is inside one,
  its process, the replica that it has been waiting for long, a flag if it has returned, and a line
  that describes the collective
- n * n mailboxes, first by receiver: the number of messages put in and the number taken out (a cache
  line each), then SLOTS slots, each a cache line: the caller's tag, the message's bytes, and the
  place of the message in its sender's part of the symmetric memory

A counter is stored with a release after what it announces, and read with an acquire before: see
ltc/llvm/native/shared_counters.py, and tests/models/shared_memory.py for the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

import torch

from ltc.backends import shared_counters
from ltc.errors import PeerFailure
from ltc.support.process.private_folder import reserve, shared_file

LANES = 2  # regions of a run: of what programs exchange, and of what is exchanged at once
SLOTS = 4
LINE = 64  # bytes of a cache line: two writers never share one
_REPORT_BYTES = 1 << 16
_AGREED = 2  # index of a word of the abort report's line
_ENTRY_BYTES = 1024
_SUM_BYTES = 2 * LINE
_TEXT_BYTES = _ENTRY_BYTES - LINE
_MAILBOX_BYTES = (2 + SLOTS) * LINE
NAP_SECONDS = 0.02  # a sleeper looks this often whether somebody has found a fault
# Of a part of symmetric memory; all parts together take at most a share of what is free.
MOST_PART_BYTES, LEAST_PART_BYTES, _SHARE_OF_FREE = 64 << 20, 1 << 20, 4


def region_bytes(replicas: int) -> int:
    """Bytes that `replicas` need to exchange at all."""
    return _shared_bytes(replicas) + replicas * LEAST_PART_BYTES


def _shared_bytes(replicas: int) -> int:
    return _first_mailbox(replicas) + replicas * replicas * _MAILBOX_BYTES


def _first_mailbox(replicas: int) -> int:
    return _REPORT_BYTES + replicas * (_SUM_BYTES + _ENTRY_BYTES)


class SymmetricMemory:
    """A part for each replica of a host, one after the other: its owner writes, all of them read.

    Args:
        nbytes: The size of one part.
        file: The descriptor of the mapped file, or -1 where the replicas are threads of this
            process.
    """

    def __init__(self, memory: mmap.mmap, nbytes: int, file: int = -1) -> None:
        self.memory, self.nbytes, self.file = memory, nbytes, file
        self.words = memoryview(memory).cast("q")
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()

    @classmethod
    def of_threads(cls, replicas: int) -> SymmetricMemory:
        memory = mmap.mmap(-1, replicas * MOST_PART_BYTES)  # pages come when they are touched
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # advice only
                memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(memory, MOST_PART_BYTES)

    @classmethod
    def of_processes(cls, replicas: int, region: Region, path: str) -> SymmetricMemory:
        """Map the memory in the file `path`, of a size that the first replica finds room for."""
        system = os.statvfs(os.path.dirname(path))
        free = system.f_bavail * system.f_frsize // (_SHARE_OF_FREE * replicas)
        nbytes = region.agreed(max(min(free, MOST_PART_BYTES) // mmap.PAGESIZE, 1)) * mmap.PAGESIZE
        file = shared_file(path, replicas * nbytes)
        return cls(mmap.mmap(file, replicas * nbytes), nbytes, file)

    def reserve(self, start: int, nbytes: int) -> None:
        """Have the system give the memory now: where it has none, an error, not a signal later."""
        if self.file >= 0:
            reserve(self.file, start, nbytes)


class Region:
    """The shared memory itself, as one replica or many of this process use it.

    Attributes:
        memory: A writable mapping of zeros, shared with the others.
        file: Its descriptor, or -1 where the replicas are threads of this process.
        messages: The memory of sent messages, in the sender's part.
    """

    def __init__(self, replicas: int, memory: mmap.mmap, file: int = -1) -> None:
        self.replicas, self.memory, self.file = replicas, memory, file
        self.words = memoryview(memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._lock = threading.Lock()
        self._sleeper = shared_counters.Sleeper(NAP_SECONDS)
        self.messages: SymmetricMemory
        self.one_shot_sums: SymmetricMemory | None = None  # for operands of one-shot sums
        self.thread_messages: dict[int, deque] = {}  # by mailbox: see ThreadsWire

    @classmethod
    def of_threads(cls, replicas: int) -> Region:
        region = cls(replicas, mmap.mmap(-1, _shared_bytes(replicas)))
        region.messages = SymmetricMemory.of_threads(replicas)
        return region

    @classmethod
    def of_processes(cls, replicas: int, path: str) -> Region:
        """The region in the file `path`, made by whichever process comes first.

        Raises:
            LtcError: If there is no room for it.
        """
        size = _shared_bytes(replicas)
        file = shared_file(path, size)
        reserve(file, 0, size)
        region = cls(replicas, mmap.mmap(file, size), file)
        region.messages = SymmetricMemory.of_processes(replicas, region, f"{path}-messages")
        return region

    # --- mailboxes

    def mailbox(self, sender: int, receiver: int) -> int:
        """Offset, in bytes, of the mailbox from one replica to another."""
        place = receiver * self.replicas + sender
        return _first_mailbox(self.replicas) + place * _MAILBOX_BYTES

    def slot(self, mailbox: int, message: int) -> int:
        """Offset of the slot of message number `message`."""
        return mailbox + (2 + message % SLOTS) * LINE

    # --- one-shot sums

    def published(self, replica: int) -> int:
        """Return the offset of the counter of one-shot sums whose operands a replica has written."""
        entries = _REPORT_BYTES + self.replicas * _ENTRY_BYTES
        return entries + replica * _SUM_BYTES

    def released(self, replica: int) -> int:
        """Offset of the counter of the one-shot sums of which a replica needs nothing any more."""
        return self.published(replica) + LINE

    def agreed(self, value: int) -> int:
        """Return the number that the first caller proposes; it is not 0."""
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
        """Return the index of the word that names the replica `replica` has long waited for.

        The word is 0, or 1 + ordinal. Two words follow: the offset of the counter it looks at, and
        the value that it waits for.
        """
        return (_REPORT_BYTES + replica * _ENTRY_BYTES) // 8 + 4

    def say_waiting(self, replica: int, peer: int, offset: int, value: int) -> None:
        """Say that `replica` has waited long for `peer` to bring a counter to a value."""
        at = self.waiting_word(replica)
        self.words[at + 1], self.words[at + 2] = offset, value
        self.store(8 * at, peer + 1)

    def waits_for(self, replica: int) -> int | None:
        """Return the replica for which this one has reported a long wait.

        None if the awaited value has arrived: it has only had no processor since.
        """
        at = self.waiting_word(replica)
        word = self.load(8 * at)
        offset, value = self.words[at + 1 : at + 3]
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
            self.store(0, 1)  # last: readers look here first

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the region for one replica at a time, of this process or another."""
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
        if self.failed and self.load(0):
            text = bytes(self.memory[LINE : LINE + self.words[1]])
            raise PeerFailure(text.decode(errors="replace"))

    # --- waiting

    def store(self, offset: int, value: int) -> None:
        """Store a counter and wake the waiters that sleep until it changes."""
        shared_counters.store(self.address + offset, value)

    def load(self, offset: int) -> int:
        """Return a counter; its writer's earlier writes are visible from now on."""
        return shared_counters.load(self.address + offset)

    def wait_at_least(self, offset: int, value: int, who_is_late) -> None:
        """Block until the counter at `offset` has reached `value`; the GIL is free meanwhile.

        Args:
            who_is_late: Called repeatedly with the seconds waited so far; it may report.

        Raises:
            PeerFailure: Raised as soon as there is an abort report.
        """
        address = self.address + offset
        if shared_counters.load(address) >= value:
            return
        started = time.monotonic()
        while self._sleeper.wait(address, value) < value:
            self.raise_abort_report()
            who_is_late(time.monotonic() - started)
