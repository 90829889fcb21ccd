"""The memory that the tensors of each device hold."""

from __future__ import annotations

from collections.abc import Callable

from ltc.support.observation import metrics


def _nothing() -> int:
    return 0


class Account:
    """Bytes held by the values of one device, and the most there were when a buffer was made.

    Attributes:
        in_buffers: The bytes of live buffers.
        elsewhere: Gives the bytes of values that are in no buffer.
        freed: Number of freed buffers.
        freed_by_mark: Their number at the latest step mark.
    """

    def __init__(self) -> None:
        self.in_buffers = self.peak = self.buffers = 0
        self.elsewhere: Callable[[], int] = _nothing
        self.freed = self.freed_by_mark = self._noted = self._forgotten = 0

    def add(self, nbytes: int, buffers: int = 1) -> None:
        """Count `buffers` new buffers, of `nbytes` together."""
        self.in_buffers += nbytes
        self.buffers += buffers
        held = self.in_buffers if self.elsewhere is _nothing else self.bytes
        if held > self.peak:
            self.peak = held

    @property
    def bytes(self) -> int:
        return self.in_buffers + self.elsewhere()

    def remove(self, nbytes: int) -> None:
        self.in_buffers -= nbytes
        self.buffers -= 1
        self.freed += 1

    def note_freed(self) -> None:
        """Count those that were freed by the latest mark."""
        freed, self._noted = self.freed_by_mark - self._noted, self.freed_by_mark
        if freed:
            metrics.count("DestroyLtcTensor", freed)

    @property
    def freed_in_all(self) -> int:
        """Return how many buffers were freed since the start, or since `forget_freed`."""
        return self.freed - self._forgotten

    def forget_freed(self) -> None:
        self._forgotten = self.freed


_accounts: dict[int, Account] = {}
OF_NOTHING = Account()  # of buffers whose memory never came to be


def all_accounts() -> list[tuple[int, int]]:
    """(device, bytes that its live buffers hold) of each device that has had any."""
    return [(device, account.bytes) for device, account in list(_accounts.items())]


def account_of(device: int) -> Account:
    return _accounts.get(device) or _accounts.setdefault(device, Account())


def _note_freed() -> None:
    for account in list(_accounts.values()):
        account.note_freed()


metrics.before_reading(_note_freed)
