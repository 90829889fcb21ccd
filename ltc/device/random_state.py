"""Random state of every ltc device: a running seed, drawn from while recording.

Every random call takes the next running seed as a run-time input, so drawing never recompiles.
The law is that of the lazy tensor core: default seed 101; a draw advances the running seed,
a step mark reseeds it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

DEFAULT_SEED = 101
_MASK = (1 << 64) - 1
_BACK = pow(214013, -1, 1 << 64)


class RandomState:
    """The seeds of one device.

    Attributes:
        seed: The seed at the start of the step.
        running: The seed that the next draw advances.
    """

    __slots__ = ("seed", "running", "initial")

    def __init__(self, seed: int = DEFAULT_SEED) -> None:
        self.reset(seed)

    def reset(self, seed: int) -> None:
        self.initial = self.seed = self.running = seed & _MASK

    def draw(self) -> int:
        """The seed of one random call: a signed 64-bit integer."""
        self.running = (214013 * self.running + 2531011) & _MASK
        return _signed(self.running)

    def undraw(self) -> None:
        """The last draw has not been: its call comes again."""
        self.running = (self.running - 2531011) * _BACK & _MASK

    def end_step(self) -> None:
        """A step mark: the next step draws from a seed of its own."""
        self.seed = self.running = (7012063 * self.seed + 1012031) & _MASK

    def as_tensor(self) -> torch.Tensor:
        """The state as bytes, for torch.ltc.get_rng_state and checkpoints."""
        words = [_signed(self.seed), _signed(self.running), _signed(self.initial)]
        return torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8).clone()

    def as_number(self) -> int:
        """The state as one integer, for ltm.get_rng_state: the seed while nothing was drawn from it.

        Behind a draw the seed stands above the running one, since the next step's follows from it.
        """
        if self.running == self.seed:
            return self.seed
        return (self.seed + 1) << 64 | self.running  # + 1: that of seed 0 is no plain seed either

    def restore_number(self, state: Any) -> None:
        """Go back to what `as_number` gave; any other integer is a seed.

        Raises:
            TypeError: If `state` is no integer.
        """
        try:
            number = operator.index(state)
        except TypeError:
            raise TypeError(
                f"An ltc device is seeded with an integer, or with what ltm.get_rng_state() returned; "
                f"got {state!r}, a {type(state).__name__}."
            ) from None
        above = number >> 64
        self.reset(above - 1 if above > 0 else number)
        self.running = number & _MASK

    def restore(self, state: torch.Tensor) -> None:
        if state.dtype != torch.uint8 or state.numel() != 24:
            raise RuntimeError(
                f"An ltc random state is a ByteTensor of 24 elements, got {state.dtype} of "
                f"{state.numel()}. Pass what torch.ltc.get_rng_state() returned."
            )
        words = state.cpu().clone().view(torch.int64).tolist()
        self.seed, self.running, self.initial = (word & _MASK for word in words)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
