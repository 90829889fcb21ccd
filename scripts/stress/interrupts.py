"""Ctrl-C at random instants of a training: nothing hangs, no parameter is between two steps.

    python scripts/stress/interrupts.py --count 1000            all ways to train, 1000 instants in all
    python scripts/stress/interrupts.py --only replay --seed 3  one of them, other instants

A training is interrupted at a random instant of each few steps, and goes on: the step that was
interrupted is made again where it had not happened. After each interrupt every parameter and every
value of the optimizer's must have the bits from before that step or from after it, all of them
alike, so the whole ends as one that was never disturbed. (A step that was cut off behind the
optimizer's is a program of its own, and may round differently, as may one whose program was compiled
meanwhile: such are counted apart.) An instant that takes longer than --limit seconds is a hang: all
stacks are printed, and the code is 1.

The table says which part of the step the interrupt came out of. That is where the program's own code is
at work, or a mark or read before it begins: an interrupt that comes within a mark, a backward or an
optimizer's step comes out behind it.

steady    a step that was recorded before
shapes    a new shape at every step: recorded and run on PyTorch's kernels
compile   the same, compiled at once
op_by_op  calls that run when they are made
replay    a step under ltc.compile
loader    batches from MpDeviceLoader
saving    a checkpoint after every step, written here
behind    a checkpoint after every step, written behind
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
import ltc.distributed.parallel_loader as pl
from ltc import config
from ltc.utils.checkpoint import CheckpointManager

STEPS = 12  # then it begins anew: as many states are known
WARM_UP = 4  # times through all steps, before the first instant


class Training:
    """A small network under momentum or Adam, and the part of a step under way.

    Attributes:
        phase: The step's present part, for the table.
    """

    def __init__(self, name: str, folder: Path):
        torch.manual_seed(0)
        self.name, self.phase = name, "start"
        self.batches = [
            (torch.randn(self._rows(k), 8), torch.randint(4, (self._rows(k),)))
            for k in range(STEPS)
        ]
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh()
        )
        self.model.append(nn.Linear(16, 4)).to("ltc")
        kinds: list[Callable] = [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.Adam(p, lr=0.01),
        ]
        self.optimizer = kinds[len(name) % 2](self.model.parameters())
        self.manager = CheckpointManager(folder, model=self.model, optimizer=self.optimizer)
        self.compute = ltc.compile(self._compute) if name == "replay" else self._compute
        self._first: dict | None = None

    def _rows(self, k: int) -> int:
        return 4 + k if self.name in ("shapes", "compile") else 4

    def begin_anew(self) -> None:
        """Go back to the state before the first step, in the same tensors."""
        if self._first is None:
            self.run_step(0)  # so that the optimizer has all it will have
            self._first = {"at": [x.detach().cpu().clone() for x in self.tensors()]}
        with torch.no_grad():
            for x, value in zip(self.tensors(), self._first["at"], strict=True):
                x.copy_(value)
        ltm.mark_step(wait=True)

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, and what the optimizer keeps of each."""
        states = [
            x
            for p in self.model.parameters()
            for x in self.optimizer.state[p].values()
            if isinstance(x, torch.Tensor)
        ]
        return [*self.model.parameters(), *states]

    def state(self) -> tuple[bytes, ...]:
        return tuple(x.detach().cpu().numpy().tobytes() for x in self.tensors())

    def run_step(self, k: int) -> None:
        self.phase = "uploading"
        x, y = (part.to("ltc") for part in self.batches[k])
        self._train(x, y)
        self._save(k)

    def _train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.phase = "recording"
        loss = self.compute(x, y)
        self.phase = "running"
        ltm.mark_step()
        self.phase = "reading"
        loss.item()
        self.phase = "between"

    def _compute(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _save(self, k: int) -> None:
        if self.name in ("saving", "behind"):
            self.phase = "saving"
            self.manager.save(k, blocking=self.name == "saving")

    def steps_from(self, first: int) -> Iterator[int]:
        """Make the steps from `first` on; gives the number of each once it is over."""
        if self.name != "loader":
            for k in range(first, STEPS):
                self.run_step(k)
                yield k + 1
            return
        self.phase = "loading"
        for k, (x, y) in enumerate(pl.MpDeviceLoader(self.batches[first:], "ltc"), start=first):
            self._train(x, y)
            yield k + 1
            self.phase = "loading"


def _is_close(state: tuple[bytes, ...], other: tuple[bytes, ...]) -> bool:
    """Return True if they are one, but for the rounding of sums in another order."""
    pairs = [
        [torch.frombuffer(bytearray(x), dtype=torch.float32) for x in p] for p in zip(state, other)
    ]
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in pairs)


class Interrupted(KeyboardInterrupt):
    """Raised by the signal's handler."""


class Alarm:
    """The signal's handler, which raises where it is expected: it may come once all is over."""

    is_expected = False

    def __call__(self, number: int, frame: object) -> None:
        if self.is_expected:
            self.is_expected = False
            raise Interrupted

    def set(self, seconds: float) -> None:
        self.is_expected = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def stop(self) -> None:
        self.is_expected = False
        signal.setitimer(signal.ITIMER_REAL, 0)


alarm = Alarm()


def known_states(training: Training) -> list[tuple[bytes, ...]]:
    """Return the state before each step and after the last, of an undisturbed training."""
    for _ in range(WARM_UP):
        training.begin_anew()
        states = [training.state(), *[training.state() for _ in training.steps_from(0)]]
    return states


class Instants:
    """The interrupts of one way to train, and what came of them."""

    def __init__(self, name: str, chosen: argparse.Namespace, folder: Path):
        self.choose = random.Random(f"{name} {chosen.seed}")
        self.training, self.limit = Training(name, folder), chosen.limit
        self.states = known_states(self.training)
        self.done = 0  # steps of the present pass that have happened
        self.rounded = 0  # after steps whose programs were others than when the states were made
        self.phases: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        started = time.perf_counter()
        self.training.begin_anew()
        for _ in self.training.steps_from(0):
            pass
        self.seconds = (time.perf_counter() - started) / STEPS

    def run(self, count: int) -> None:
        self.training.begin_anew()
        while self.phases.total() < count:
            faulthandler.dump_traceback_later(self.limit, exit=True)
            self.one()
        faulthandler.cancel_dump_traceback_later()

    def one(self) -> None:
        """Train until the signal comes, then look at what is there, and go on from there."""
        training = self.training
        if self.done == STEPS:
            self.check_end()
        try:
            alarm.set(self.choose.uniform(1e-5, 3 * self.seconds))
            for done in training.steps_from(self.done):
                self.done = done
            alarm.stop()
            return
        except Interrupted:
            pass
        except Exception as error:  # the interrupt came out as something else
            alarm.stop()
            self.note_wrong(f"{training.phase}: {type(error).__name__}: {error}")
            return
        phase = training.phase
        self.phases[phase] += 1
        self.see_where_it_is(phase)

    def see_where_it_is(self, phase: str) -> None:
        try:
            ltm.mark_step(wait=True)
            now = self.training.state()
        except BaseException as error:
            self.note_wrong(f"{phase}: reading raised {type(error).__name__}: {error}"[:300])
            return
        near = [k for k in (self.done, self.done + 1) if self.states[k : k + 1] == [now]]
        if near:
            self.done = near[0]
        elif any(_is_close(now, state) for state in self.states[self.done : self.done + 2]):
            self.note_rounded()
        else:
            parts = zip(now, self.states[self.done], self.states[min(self.done + 1, STEPS)])
            said = "".join("b" if x == b else "a" if x == a else "?" for x, b, a in parts)
            self.note_wrong(f"{phase}: neither before nor after: {said}")

    def note_rounded(self) -> None:
        self.rounded += 1
        self.done = 0
        self.training.begin_anew()

    def note_wrong(self, what: str) -> None:
        self.wrong[what] += 1
        self.done = 0
        self.training.begin_anew()

    def check_end(self) -> None:
        last = self.training.state()
        if not _is_close(last, self.states[-1]):
            self.note_wrong("the last state differs")
        elif last != self.states[-1]:
            self.rounded += 1
        self.done = 0
        self.training.begin_anew()


TIERS = {"compile": "native", "op_by_op": "op_by_op"}
WAYS = ("steady", "shapes", "compile", "op_by_op", "replay", "loader", "saving", "behind")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="instants in all")
    parser.add_argument("--only", choices=WAYS, help="interrupt in this way alone")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that make a hang")
    chosen = parser.parse_args(arguments)
    ways, failures = [chosen.only] if chosen.only else WAYS, 0
    signal.signal(signal.SIGALRM, alarm)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for way in ways:
        with (
            tempfile.TemporaryDirectory() as folder,
            config.override(LTC_TIER=TIERS.get(way, "auto")),
        ):
            instants = Instants(way, chosen, Path(folder))
            instants.run(chosen.count // len(ways))
            instants.training.manager.wait()
        table = ", ".join(f"{phase} {n}" for phase, n in sorted(instants.phases.items()))
        rounded = f"; {instants.rounded} rounded differently" if instants.rounded else ""
        print(f"{way:9} {instants.phases.total()} instants: {table}{rounded}", flush=True)
        for what, times in instants.wrong.items():
            print(f"  WRONG {times}x {what}", flush=True)
        failures += instants.wrong.total()
    print(f"{failures} wrong")
    return int(failures > 0)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code) if code else sys.exit(0)
