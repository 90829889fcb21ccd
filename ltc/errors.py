"""The errors ltc raises of its own; a wrong argument stays Python's ValueError or TypeError."""

from __future__ import annotations

from typing import Any

import torch


class LtcError(RuntimeError):
    """The base of ltc's own errors."""


class Unsupported(LtcError, NotImplementedError):
    """Valid PyTorch that ltc, or this backend, cannot run; the message names an alternative."""


class CodeRefused(LtcError):
    """The system forbids executable memory: compiled kernels cannot run."""


class NowhereToMeet(LtcError):
    """This process is one of several, and they have no meeting point."""


class OutOfRangeIndexError(IndexError, RuntimeError):
    """An index outside its dimension, for which eager PyTorch raises the one or the other."""


class InvalidGraph(LtcError):
    """A graph that breaks a rule of the IR: a fault of ltc or of a plug-in, never of the user."""


class MemoryFault(LtcError):
    """LTC_CHECK found a kernel that read unwritten memory, or wrote outside of its values."""


class OutOfMemory(LtcError, torch.OutOfMemoryError):
    """A device, or the host for it, has less memory left than an allocation needs.

    It is what PyTorch raises for other accelerators; for the CPU that is a plain RuntimeError.

    Args:
        nbytes: The size of the allocation; 0 where it is not known.
    """

    def __init__(self, text: str, nbytes: int = 0) -> None:
        super().__init__(text)
        self.nbytes = nbytes


class VerificationError(LtcError):
    """Under LTC_VERIFY: a backend has computed a wrong value; the message names value and line.

    The tensors that the program was to replace keep their values.

    Args:
        difference: The value that is wrong: see ltc/backends/verification/judgement.py.
        origin: The recorded call it belongs to, with the user's line; None where no call is known.
    """

    def __init__(self, message: str, difference: Any = None, origin: Any = None):
        super().__init__(message)
        self.difference, self.origin = difference, origin


class StepDiffers(LtcError):
    """A function that `ltc.compile` replays behaved differently in a call that checks the replay."""


class NotFinite(LtcError, ArithmeticError):
    """Under LTC_DEBUG_NANS: a program gives NaN or infinities; the message names the node and operands.

    Args:
        origin: The recorded call it belongs to, with the user's line; None where no call is known.
    """

    def __init__(self, message: str, origin: Any = None):
        super().__init__(message)
        self.origin = origin


class BudgetExceeded(LtcError):
    """A block cost more than its `ltc.budget` allows; the message names the costs and the reasons.

    Args:
        explanations: The explanations of the excess, as `ltc.explain` returns them.
    """

    def __init__(self, message: str, explanations: Any = ()) -> None:
        super().__init__(message)
        self.explanations = list(explanations)


class SyncForbidden(LtcError):
    """A pending value was read under `ltc.no_sync()`; the message names the value."""


class NotLazyTensor(RuntimeError):
    """A tensor of another device where one of a lazy device was needed.

    The text starts "Input tensor is not a lazy tensor: ", then the tensor's type.

    Args:
        tensor: The tensor; None if it is not known.
    """

    def __init__(self, text: str, tensor: torch.Tensor | None = None) -> None:
        super().__init__(text)
        self.tensor = tensor


class BackendMissing(LtcError):
    """The requested backend does not exist; the message names it and the existing ones."""


class WrongSetting(ValueError):
    """A variable of the environment has a value that it cannot have."""


class PeerFailure(RuntimeError):
    """A collective that cannot end: replicas disagree, one is absent, or one has failed.

    Every replica of the region raises the same text.
    """


class RankFailed(LtcError):
    """A rank ended before its function returned.

    The exception that the rank raised is the `__cause__`, if it could be pickled.

    Args:
        rank: The rank.
        pid: Its process.
        cause: The reason of its end, in a line.
        traceback: Its whole traceback; empty if it left none.
        waiting: Rank -> the stacks of its threads at that time, for every rank that still ran.

    Example:
        >>> from ltc.distributed.lazy_multiprocessing import RankFailed, spawn
        >>> try:
        ...     spawn(lambda rank: 1 // rank, nprocs=2, start_method="fork")
        ... except RankFailed as error:
        ...     print(error.rank, error.cause)
        0 it raised ZeroDivisionError: integer division or modulo by zero
    """

    FAILED_TOO = "It failed too: "  # how the text in `waiting` of such a rank begins

    def __init__(self, rank: int, pid: int, cause: str, traceback: str, waiting: dict[int, str]):
        super().__init__(rank, pid, cause, traceback, waiting)
        self.rank, self.pid, self.cause = rank, pid, cause
        self.traceback, self.waiting = traceback, waiting

    def __str__(self) -> str:
        cause = self.cause.splitlines()[0] if self.traceback else self.cause  # which ends in it
        parts = [f"Rank {self.rank} (pid {self.pid}) ended before the others: {cause}"]
        if self.traceback:
            parts.append(f"Its traceback:\n{self.traceback.rstrip()}")
        parts += [
            f"Rank {rank} was here:\n{self._news(text)}" for rank, text in self.waiting.items()
        ]
        if self.waiting:
            parts.append(f"The fault is rank {self.rank}'s: {self.cause.splitlines()[0]}")
        return "\n\n".join(parts)

    def _news(self, text: str) -> str:
        """Return what another rank says, without the lines of an error that both have raised."""
        first, *rest = text.rstrip().splitlines() or [""]
        if first.startswith(self.FAILED_TOO):
            told = set(self.traceback.splitlines())
            rest = [line for line in rest if line not in told]
        return "\n".join([first, *rest])


class ReplicasDiffer(LtcError):
    """Replicas hold different values of tensors that should be the same.

    Args:
        names: Names of the tensors that differ, in the model's order.
        ordinals: The replicas whose value differs from most others'; of two replicas, both.

    Example:
        >>> def replica(rank):
        ...     try:
        ...         ltm.check_replicas({"scale": torch.full((), rank, device="ltc")})
        ...     except ltm.ReplicasDiffer as error:
        ...         return error.names, error.ordinals
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> spawn(replica, nprocs=2, start_method="fork")
        [(['scale'], [0, 1]), (['scale'], [0, 1])]
    """

    def __init__(self, message: str, names: list[str], ordinals: list[int]) -> None:
        super().__init__(message)
        self.names, self.ordinals = names, ordinals

    def __reduce__(self) -> tuple:  # exceptions travel between ranks
        return type(self), (str(self), self.names, self.ordinals)


class DamagedFile(LtcError):
    """A file that is not what a save wrote; the text names the file, the place and the fault.

    Example:
        >>> import ltc.utils.serialization as xser
        >>> open("short.safetensors", "wb").close()
        >>> try:
        ...     xser.load("short.safetensors")
        ... except xser.DamagedFile as error:
        ...     print(error)
        short.safetensors: 0 bytes are too few for a safetensors file.
    """
