"""The errors ltc raises of its own; a wrong argument stays Python's ValueError or TypeError."""

from __future__ import annotations

from typing import Any

import torch


class LtcError(RuntimeError):
    """Anything that only ltc can get wrong."""


class Unsupported(LtcError, NotImplementedError):
    """Valid PyTorch that ltc, or this backend, can not run; the message says what to do instead."""


class CodeRefused(LtcError):
    """The system lets no memory become machine code: kernels that are compiled can not run."""


class NowhereToMeet(LtcError):
    """This process is one of several, and nothing says where they find each other."""


class OutOfRangeIndexError(IndexError, RuntimeError):
    """An index outside its dimension, for which eager PyTorch raises the one or the other."""


class InvalidGraph(LtcError):
    """A graph that breaks a rule of the IR: a fault of ltc or of a plug-in, never of the user."""


class MemoryFault(LtcError):
    """A kernel that used memory which nobody wrote, or wrote where it may not: LTC_CHECK found it."""


class OutOfMemory(LtcError, torch.OutOfMemoryError):
    """A device, or the host for it, has less memory left than was asked for.

    It is what PyTorch raises for other accelerators; for the CPU that is a plain RuntimeError.
    nbytes  that were asked for at once; 0 where nobody said
    """

    def __init__(self, text: str, nbytes: int = 0) -> None:
        super().__init__(text)
        self.nbytes = nbytes


class VerificationError(LtcError):
    """Under LTC_VERIFY: a backend has computed something wrong; the message says what and where.

    difference  the value that is wrong: see ltc/backends/verification/judgement.py
    origin      the recorded call it belongs to, with the user's line; None where no call is known

    What the program was to replace is as it was before.
    """

    def __init__(self, message: str, difference: Any = None, origin: Any = None):
        super().__init__(message)
        self.difference, self.origin = difference, origin


class StepDiffers(LtcError):
    """A function that `ltc.compile` replays did something else when it was called to check."""


class NotFinite(LtcError, ArithmeticError):
    """Under LTC_DEBUG_NANS: a program gives NaN or infinities; the message says which node and why.

    origin  the recorded call it belongs to, with the user's line; None where no call is known
    """

    def __init__(self, message: str, origin: Any = None):
        super().__init__(message)
        self.origin = origin


class BudgetExceeded(LtcError):
    """A block has cost more than its `ltc.budget` allows; the message says of what, and why.

    explanations  what `ltc.explain` tells of it
    """

    def __init__(self, message: str, explanations: Any = ()) -> None:
        super().__init__(message)
        self.explanations = list(explanations)


class SyncForbidden(LtcError):
    """A read of what is pending under `ltc.no_sync()`; the message says of what."""


class NotLazyTensor(RuntimeError):
    """A tensor of another device where one of a lazy device was needed.

    The text starts "Input tensor is not a lazy tensor: ", then the tensor's type.
    """


class BackendMissing(LtcError):
    """The backend that should run a device is not there; the message names it and those that are."""
