"""Programs drawn at random that add numbers of 16 bits: run in each way, and judged by float64.

A program makes some of the sums of accumulations.py, of numbers drawn at random, and computes with
them.  It comes several times at one size, and then at others, so that it is interpreted first,
compiled later, and compiled for any size at last.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

import ltc.core.lazy_model as ltm
from ltc import config
from tests.accumulations import OF_SQUARES, SUMS, Terms, is_exact

REPEATED, RESIZED = 4, 6
COUNTS = {torch.bfloat16: (300, 1500), torch.float16: (3000, 6000)}  # ones stop at 256 and at 2048
SETTINGS: tuple[dict[str, Any], ...] = (
    {"LTC_TIER": "native"}, {"LTC_TIER": "op_by_op"}, {"LTC_TIER": "native", "LTC_BACKEND": "eager"},
)  # fmt: skip


class RandomSums:
    """The program of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed, drawn = seed, random.Random(seed)
        self.dtype = drawn.choice(list(COUNTS))
        small = self.dtype is torch.bfloat16
        names = [name for name in SUMS if small or name not in OF_SQUARES]
        self.names = drawn.sample(names, drawn.randint(1, 3))
        self.factor = drawn.choice((0.5, 1.0, 2.0))
        self.sizes = [drawn.randint(*COUNTS[self.dtype])] * REPEATED
        self.sizes += [self.sizes[0] + drawn.randint(1, 64) for _ in range(RESIZED)]

    def __str__(self) -> str:
        return f"{', '.join(self.names)} in {self.dtype}"

    def run(self, count: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        terms = Terms(count, self.dtype, dtype, device, self._numbers())
        return [(SUMS[name](terms).detach() * self.factor).relu() for name in self.names]

    def _numbers(self):
        """Numbers around 1, the same for every device."""
        generator = torch.Generator().manual_seed(self.seed)
        return lambda shape: torch.rand(shape, generator=generator) + 0.5

    def failure(self) -> str | None:
        """The first run whose sums are not as exact as their dtype; None where all are."""
        with config.override(LTC_TIER="auto", LTC_CACHE=0):
            found = next(self._failures(self.sizes), None)
        for settings in SETTINGS if found is None else ():
            with config.override(**settings):
                found = found or next(self._failures(self.sizes[:1]), None)
            found = found and f"{found} under {settings}"
        return found

    def _failures(self, sizes: list[int]) -> Iterator[str]:
        for step, count in enumerate(sizes):
            made = self.run(count, self.dtype, "ltc")
            ltm.mark_step(wait=True)
            exact = self.run(count, torch.float64, "cpu")
            for name, mine, sum_of in zip(self.names, made, exact, strict=True):
                if not is_exact(mine, sum_of, self.dtype):
                    yield f"{name} of {count} in {self.dtype} at step {step}: {mine.cpu()}, not {sum_of}"
