"""How much memory the tensors of each device hold."""

from __future__ import annotations

from ltc.debug import metrics


class Account:
    """Bytes held by the live buffers of one device, and the most there ever were.

    freed          how many buffers were freed
    freed_by_mark  how many had been at the latest step mark
    """

    def __init__(self) -> None:
        self.bytes = self.peak = self.buffers = 0
        self.freed = self.freed_by_mark = self._noted = self._forgotten = 0

    def add(self, nbytes: int, buffers: int = 1) -> None:
        """So many buffers came to be, of `nbytes` together."""
        self.bytes += nbytes
        self.buffers += buffers
        if self.bytes > self.peak:
            self.peak = self.bytes

    def remove(self, nbytes: int) -> None:
        self.bytes -= nbytes
        self.buffers -= 1
        self.freed += 1

    def note_freed(self) -> None:
        """Count those that were freed by the latest mark."""
        freed, self._noted = self.freed_by_mark - self._noted, self.freed_by_mark
        if freed:
            metrics.count("DestroyLtcTensor", freed)

    @property
    def freed_in_all(self) -> int:
        """How many buffers were freed since the start, or since `forget_freed`."""
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
