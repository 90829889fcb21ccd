"""Compared tests: each returns what it computed on a device, which has to be what the CPU returns.

A body runs several times in a row, each time with other random values, until a compiled program
follows its calls. Then a call that nobody expects comes in its midst, and it runs once more with the
same values. Afterwards it runs once where every program is compiled first, and once by the backend of
PyTorch's kernels.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ltc import config
from ltc.debug import metrics
from tests import states

MOST_RUNS = 4  # in a row, till its calls are followed
DEVICE = "ltc:0"
reached: Counter[str] = Counter()  # state -> tests that came to it

# Both devices compute in float64 what the tests compare closely; what differs is the order of
# sums, some units in the last place. float32 results pass through fewer than 1e4 roundings.
TOLERANCES = {
    torch.float64: (1e-9, 1e-9),
    torch.complex128: (1e-9, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.bfloat16: (2e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}


class Comparison:
    """A test's body, and how often it ran on ltc.

    passed  the states that its runs passed through
    """

    def __init__(self, body: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._body, self._arguments = body, arguments
        self.runs = self._seed = 0
        self.passed: set[str] = set()
        self.draw()

    def draw(self) -> None:
        """Take other random values, and find what the CPU makes of them."""
        self._seed += 1
        self._calls = _CountedCalls()
        with self._calls:
            self._on_cpu = self._on("cpu")
        assert self._on_cpu is not None, "a compared test returns what is to be compared"

    def run(self, path: str, around: AbstractContextManager[object] | None = None) -> set[str]:
        """Run it on ltc, and compare.

        Args:
            path: What an error calls this run.
            around: Entered while it runs.

        Returns:
            The states that it passed through.
        """
        self.runs += 1
        with metrics.counted() as grown:
            with around or nullcontext():
                on_ltc = self._on(DEVICE)
            states.end_step()
        assert_equal(on_ltc, self._on_cpu, f"{path}, run {self.runs}")
        passed = states.states_of(grown)
        self.passed |= passed
        return passed

    def stray_call(self) -> StrayCall:
        """A call that comes in the midst of those that the body makes."""
        return StrayCall(self._calls.count // 2)

    def _on(self, device: str) -> Any:
        seed_everything(self._seed - 1)
        return self._body(**{**self._arguments, "device": device})


def run(body: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Compare ltc with the CPU in one state after the other."""
    comparison = Comparison(body, arguments)
    while comparison.runs < MOST_RUNS and states.FOLLOWED not in comparison.passed:
        comparison.run("as a user runs it")
        states.wait_for_the_compiler()
        comparison.draw()
    comparison.run("left in its midst", comparison.stray_call())
    comparison.run("taken up again")
    reached.update(comparison.passed)
    with config.override(LTC_TIER="native"):
        comparison.run("compiled first")
        with config.override(LTC_BACKEND="eager"):
            comparison.run("by the eager backend")


class _CountedCalls(TorchFunctionMode):
    """Counts the calls of PyTorch's functions that a body makes itself."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **kwargs or {})


class StrayCall(TorchFunctionMode):
    """Makes calls on ltc that belong to nobody, after a number of PyTorch's functions."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after
        self._kept: list[torch.Tensor] = []

    @property
    def is_made(self) -> bool:
        return bool(self._kept)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        self._left -= 1
        if self._left == 0 or (self._left < 0 and not self._kept):
            self._kept.append(torch.full((3,), 0.5, device=DEVICE).erfinv())
        return made


def seed_everything(seed: int = 0) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def assert_equal(on_ltc, on_cpu, path: str = "result") -> None:
    """Compare nested results: tensors within the tolerance of their dtype, all else by ==."""
    if isinstance(on_cpu, torch.Tensor):
        assert isinstance(on_ltc, torch.Tensor), f"{path} is {type(on_ltc)} on ltc"
        rtol, atol = TOLERANCES.get(on_cpu.dtype, (0, 0))
        torch.testing.assert_close(
            on_ltc.detach().cpu(),
            on_cpu.detach(),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda text: f"{path}: {text}",
        )
    elif isinstance(on_cpu, dict):
        assert on_ltc.keys() == on_cpu.keys(), path
        for key in on_cpu:
            assert_equal(on_ltc[key], on_cpu[key], f"{path}[{key!r}]")
    elif isinstance(on_cpu, (list, tuple)) and not isinstance(on_cpu, torch.Size):
        assert len(on_ltc) == len(on_cpu), path
        for index, (mine, theirs) in enumerate(zip(on_ltc, on_cpu)):
            assert_equal(mine, theirs, f"{path}[{index}]")
    else:
        assert on_ltc == on_cpu, path
