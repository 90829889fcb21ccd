"""The options of device loaders, and the errors of those that cannot be."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy

UNEVEN = ("drop", "error", "pad")


@dataclass(frozen=True)
class LoaderOptions:
    """The options of reading a source and dealing its batches; see ParallelLoader.

    Raises:
        TypeError: For a number that is no integer.
        ValueError: For one that is too small, or for another `uneven`.
    """

    batchdim: int = 0
    batches_per_execution: int = 1
    loader_prefetch_size: int = 8
    device_prefetch_size: int = 4
    fixed_batch_size: bool = False
    uneven: str = "drop"

    def __post_init__(self) -> None:
        self._check("batchdim", "the number of a dimension", None)
        for name in ("batches_per_execution", "loader_prefetch_size", "device_prefetch_size"):
            self._check(name, "a number of batches", 1)
        if self.uneven not in UNEVEN:
            names = ", ".join(map(repr, UNEVEN))
            raise ValueError(f"uneven={self.uneven!r} is not one of {names}.")
        if not isinstance(self.fixed_batch_size, (bool, numpy.bool_)):
            raise TypeError(
                f"fixed_batch_size={self.fixed_batch_size!r} is neither True nor False. The first batch "
                f"gives the size."
            )

    def _check(self, name: str, meaning: str, least: int | None) -> None:
        value = getattr(self, name)
        try:
            if isinstance(value, bool):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{name}={value!r} is a {type(value).__name__}: pass {meaning}, an integer"
                f"{'' if least is None else f' of at least {least}'}."
            ) from None
        if least is not None and number < least:
            raise ValueError(f"{name}={number} must be at least {least}.")
        object.__setattr__(self, name, number)

    def read_ahead(self) -> int:
        """Return the number of batches of each device that are read ahead."""
        return self.loader_prefetch_size + self.device_prefetch_size


def uneven_error(batches: int, devices: int) -> ValueError:
    return ValueError(
        f"ParallelLoader over {devices} devices got a loader of {batches} batches: "
        f"{batches % devices} would reach no device. Pass uneven='drop' to leave them out, or "
        f"uneven='pad' to deal some of them twice."
    )
