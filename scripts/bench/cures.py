"""Ten slow loops and their cures: what ltc says of each, and the time of an iteration before and after.

    python scripts/bench/cures.py              # all of them: about three minutes
    python scripts/bench/cures.py --name read  # those with "read" in their name
    python scripts/bench/cures.py --write      # without the native core and with it; into docs/why_is_it_slow.md

Each loop runs in eager PyTorch, on ltc as users have it (LTC_TIER=auto), and cured, in turns. Of each the fastest
round counts, in processor time of all threads of this process; where the cure takes waiting away, on the clock.
Exits with 1 if

- the profile, or the hint, names another cure than the one that is applied;
- the hint comes though the loop is not slower than eager PyTorch, or does not come though it takes twice as long;
- the profile names no cure, or the cure does not help, where the hint comes. Elsewhere the gain is shown, not judged.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import ltc
import ltc.core.lazy_model as ltm
from ltc.device.evidence import hints
from ltc.profiling.analysis.hindrances import hindrances

WARM, ITERATIONS, ROUNDS = 100, 200, 9
NOT_SLOWER, FAR_SLOWER = 0.95, 2.0  # times eager's; between them the hint may come or not
PATIENCE_SECONDS = 0.5  # before the hint judges; a user's are 5
PAGE = Path(__file__).resolve().parents[2] / "docs" / "why_is_it_slow.md"
Loop = Callable[..., object]
STEPS = {"ltc": ltm, "cpu": SimpleNamespace(mark_step=lambda: None)}  # eager PyTorch has no marks


class Training:
    """A small network, its optimizer and a batch on a device.

    Attributes:
        steps: Has `mark_step`.
    """

    def __init__(self, device: str = "ltc", width: int = 256) -> None:
        self.steps = STEPS[device]
        torch.manual_seed(0)
        layers = nn.Linear(64, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 10)
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(64, 64).to(device)
        self.y = torch.randint(10, (64,)).to(device)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, backward and the optimizer's step; return output and loss."""
        self.optimizer.zero_grad()
        output = self.model(self.x)
        loss = F.cross_entropy(output, self.y)
        loss.backward()
        self.optimizer.step()
        return output, loss


def reads_in_the_step(n: int, device: str = "ltc") -> None:
    training = Training(device)
    for _ in range(n):
        training.optimizer.zero_grad()
        loss = F.cross_entropy(training.model(training.x), training.y)
        loss.item()
        loss.backward()
        training.optimizer.step()
        training.steps.mark_step()


def reads_behind_the_mark(n: int) -> None:
    training = Training()
    for _ in range(n):
        _, loss = training.step()
        ltm.mark_step()
        loss.item()


def reads_without_a_mark(n: int, device: str = "ltc") -> None:
    training = Training(device)
    for _ in range(n):
        output, loss = training.step()
        loss.item()
        (output.argmax(1) == training.y).sum().item()


def marks_and_reads_behind(n: int) -> None:
    training = Training()
    for _ in range(n):
        output, loss = training.step()
        right = (output.argmax(1) == training.y).sum()
        ltm.mark_step()
        loss.item(), right.item()


def computes_behind_the_mark(n: int, device: str = "ltc") -> None:
    training = Training(device)
    for _ in range(n):
        output, loss = training.step()
        training.steps.mark_step()
        loss.item()
        (output.softmax(1).max(1).values.log().neg().mean()).item()


def computes_before_the_mark(n: int) -> None:
    training = Training()
    for _ in range(n):
        output, loss = training.step()
        surprise = output.softmax(1).max(1).values.log().neg().mean()
        ltm.mark_step()
        loss.item(), surprise.item()


def _sampled(n: int, device: str) -> list[int]:
    torch.manual_seed(0)
    model, state, found = nn.GRUCell(64, 64).to(device), torch.zeros(1, 64).to(device), []
    with torch.no_grad():
        for _ in range(n):
            state = model(state, state).sin().cos().tanh().exp().log1p().sigmoid()
            found.append(state.argmax().item())
    return found


def samples_one_by_one(n: int, device: str = "ltc") -> list[int]:
    return _sampled(n, device)


def samples_on_the_cpu(n: int) -> list[int]:
    return _sampled(n, "cpu")


def evaluates_by_reads(n: int, device: str = "ltc") -> float:
    training, right = Training(device), 0
    with torch.no_grad():
        for _ in range(n):
            right += (training.model(training.x).argmax(1) == training.y).sum().item()
    return right


def evaluates_on_the_device(n: int) -> float:
    training = Training()
    right = torch.zeros((), dtype=torch.int64, device="ltc")
    with torch.no_grad():
        for _ in range(n):
            right += (training.model(training.x).argmax(1) == training.y).sum()
            ltm.mark_step()
    return right.item()


def selects_by_a_mask(n: int, device: str = "ltc") -> None:
    training = Training(device)
    for _ in range(n):
        training.optimizer.zero_grad()
        losses = F.cross_entropy(training.model(training.x), training.y, reduction="none")
        losses[losses > 2].sum().backward()
        training.optimizer.step()
        training.steps.mark_step()


def multiplies_by_the_mask(n: int) -> None:
    training = Training()
    for _ in range(n):
        training.optimizer.zero_grad()
        losses = F.cross_entropy(training.model(training.x), training.y, reduction="none")
        (losses * (losses > 2)).sum().backward()
        training.optimizer.step()
        ltm.mark_step()


def decides_in_python(n: int, device: str = "ltc") -> None:
    training, scale = Training(device), torch.ones((), device=device)
    for _ in range(n):
        _, loss = training.step()
        scale = scale * 0.5 if loss > 2 else scale * 1.01
        training.steps.mark_step()


def decides_on_the_device(n: int) -> None:
    training, scale = Training(), torch.ones((), device="ltc")
    for _ in range(n):
        _, loss = training.step()
        scale = torch.where(loss > 2, scale * 0.5, scale * 1.01)
        ltm.mark_step()


def clips_by_a_read(n: int, device: str = "ltc") -> None:
    training = Training(device)
    for _ in range(n):
        training.optimizer.zero_grad()
        F.cross_entropy(training.model(training.x), training.y).backward()
        norm = torch.stack([p.grad.norm() for p in training.model.parameters()]).norm().item()
        for parameter in training.model.parameters():
            parameter.grad.mul_(min(1.0, 1.0 / norm))
        training.optimizer.step()
        training.steps.mark_step()


def clips_on_the_device(n: int) -> None:
    training = Training()
    for _ in range(n):
        training.optimizer.zero_grad()
        F.cross_entropy(training.model(training.x), training.y).backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
        ltm.mark_step()


def logs_in_the_step(n: int, device: str = "ltc") -> None:
    training, log = Training(device), []
    for _ in range(n):
        output, loss = training.step()
        log.append((loss.item(), output.std().item()))
        training.steps.mark_step()


def logs_in_a_step_closure(n: int) -> None:
    training, log = Training(), []
    for _ in range(n):
        output, loss = training.step()
        ltm.add_step_closure(
            lambda *told: log.append([one.item() for one in told]), (loss, output.std())
        )
        ltm.mark_step()


class Files(Dataset):
    """Samples that a disk gives after a while, in which no processor is busy."""

    def __len__(self) -> int:
        return 8 * ITERATIONS

    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(1e-3)
        return torch.full((64,), float(number % 7))


def _trains_on_files(n: int, workers: int, device: str = "ltc") -> None:
    training = Training(device)
    loader = DataLoader(Files(), batch_size=8, num_workers=workers)
    for x in itertools.islice(loader, n):
        training.optimizer.zero_grad()
        training.model(x.to(device)).square().mean().backward()
        training.optimizer.step()
        training.steps.mark_step()


def waits_for_its_files(n: int, device: str = "ltc") -> None:
    _trains_on_files(n, 0, device)


def reads_files_in_workers(n: int) -> None:
    _trains_on_files(n, 2)


@dataclass(frozen=True)
class Cure:
    """A slow loop, the cured one, and words that ltc's cure for the slow one has.

    Attributes:
        loop_text, cure_text: Their row in the table of the page.
        seconds: The time that the cure takes less of.
    """

    slow: Loop
    cured: Loop
    words: str
    loop_text: str
    cure_text: str
    seconds: Callable[[], float] = time.process_time


CURES = (
    Cure(
        samples_one_by_one, samples_on_the_cpu, "run this loop on the CPU",
        "samples, and reads each number", "run this loop on the CPU",
    ),
    Cure(
        selects_by_a_mask, multiplies_by_the_mask, "multiply by the mask",
        "selects losses by a mask", "multiply by the mask",
    ),
    Cure(
        decides_in_python, decides_on_the_device, "torch.where",
        "decides by `if loss > 2`", "`torch.where`",
    ),
    Cure(
        evaluates_by_reads, evaluates_on_the_device, "read once behind the loop",
        "evaluates, and reads each batch's count", "add up on the device, read once behind the loop",
    ),
    Cure(
        reads_in_the_step, reads_behind_the_mark, "read it after ltm.mark_step()",
        "reads the loss in the step", "read it behind the mark",
    ),
    Cure(
        computes_behind_the_mark, computes_before_the_mark, "compute this value before",
        "computes a metric behind the mark", "compute it before",
    ),
    Cure(
        reads_without_a_mark, marks_and_reads_behind, "call ltm.mark_step() after",
        "marks no step", "`ltm.mark_step()` after `optimizer.step()`",
    ),
    Cure(
        logs_in_the_step, logs_in_a_step_closure, "in a step closure",
        "logs two numbers in the step", "a step closure",
    ),
    Cure(
        clips_by_a_read, clips_on_the_device, "nn.utils.clip_grad_norm_",
        "clips by a norm that it reads", "`nn.utils.clip_grad_norm_`",
    ),
    Cure(
        waits_for_its_files, reads_files_in_workers, "num_workers",
        "waits for its files (on the clock)", "`num_workers`", time.perf_counter,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A loop as it was measured.

    Attributes:
        eager, slow, cured: Milliseconds of an iteration.
        named: The cures that the profile names.
        hint: The cure that the hint names; empty if no hint came.
    """

    name: str
    eager: float
    slow: float
    cured: float
    named: tuple[str, ...]
    hint: str

    @property
    def times_eager(self) -> float:
        return self.slow / self.eager


def faults(row: Row, words: str) -> list[str]:
    """Return what is wrong with what ltc says of a loop, and with its cure."""
    found, is_slower = [], bool(row.hint) or row.times_eager > FAR_SLOWER
    if (row.named or is_slower) and not any(words in one for one in row.named):
        found.append(f"the profile names {list(row.named)}")
    if row.hint and words not in row.hint:
        found.append(f"the hint names {row.hint!r}")
    if row.hint and row.times_eager < NOT_SLOWER:
        found.append("a hint came, of a loop that is not slower than eager")
    if not row.hint and row.times_eager > FAR_SLOWER:
        found.append("no hint came")
    if is_slower and row.cured >= row.slow:
        found.append("the cure does not help")
    return found


# --- measuring --------------------------------------------------------------------------------------


def milliseconds(loop: Loop, seconds: Callable[[], float], *device: str) -> float:
    """Return the time of an iteration, the making of the network included in all ways."""
    ltm.mark_step(wait=True)
    began = seconds()
    loop(ITERATIONS, *device)
    ltm.mark_step(wait=True)
    return (seconds() - began) / ITERATIONS * 1e3


def cures_named(loop: Loop) -> tuple[str, ...]:
    """Return the cures that a profile names for a loop."""
    with tempfile.TemporaryDirectory() as folder, ltc.profile(f"{folder}/profile.json") as run:
        loop(ITERATIONS)
    return tuple(one.cure for one in hindrances(run.trace) if one.name != "recording-bound")


def cure_hinted(loop: Loop) -> str:
    """Return the cure of the hint that comes while a loop runs, or nothing if none comes.

    It runs in this thread: the native core leaves a device that several threads use to Python.
    """
    hinted: list[str] = []
    hints._say = lambda found: hinted.append(hints.cause_of(found).cure)
    began = time.perf_counter()
    loop(ITERATIONS)
    iteration = (time.perf_counter() - began) / ITERATIONS
    hints._watch = hints._ThreadLoops()  # as patient as in the first loop
    loop(int(8 * PATIENCE_SECONDS / iteration) + 4 * hints.SAMPLES)
    hints._say = lambda found: None  # no line in the midst of the table
    return hinted[0] if hinted else ""


def measured(cure: Cure, rounds: int) -> Row:
    """Run a loop in all ways; ask twice what ltc says if its answer is wrong: others may have been busy."""
    named = cures_named(cure.slow)  # of a loop that is new, as in a user's run
    for loop in (cure.slow, cure.cured):
        loop(WARM)
    eager, slow, cured = [], [], []
    for _ in range(rounds):
        eager.append(milliseconds(cure.slow, cure.seconds, "cpu"))
        slow.append(milliseconds(cure.slow, cure.seconds))
        cured.append(milliseconds(cure.cured, cure.seconds))
    times = min(eager), min(slow), min(cured)
    row = Row(cure.slow.__name__, *times, named, cure_hinted(cure.slow))
    if faults(row, cure.words):
        named = cures_named(cure.slow) or named
        row = Row(cure.slow.__name__, *times, named, cure_hinted(cure.slow))
    return row


def judged(cure: Cure, rounds: int) -> tuple[Row, list[str]]:
    """Measure a loop and print its line; return its faults as well."""
    row = measured(cure, rounds)
    found = faults(row, cure.words)
    said = f"{'named' if row.named else 'not named'}, {'hint' if row.hint else 'no hint'}"
    print(
        f"{row.name:26} eager {row.eager:6.2f} ms, ltc {row.slow:6.2f} ({row.times_eager:.2f}x), "
        f"cured {row.cured:6.2f}  {said}{''.join(f'; FAULT: {one}' for one in found)}",
        flush=True,
    )
    return row, found


# --- the table of the page --------------------------------------------------------------------------

_TABLE = re.compile(r"^\| loop \|.*?\n(?=\n)", re.M | re.S)


def _cell(row: dict) -> str:
    return f"{row['slow']:.2f}, then {row['cured']:.2f}; {'hint' if row['hint'] else 'no hint'}"


def table(without_core: list[dict], with_core: list[dict]) -> str:
    """Return the page's table of rows that were measured without the core and with it."""
    lines = [
        "| loop | cure | eager | without the [core](states_of_a_step.md#calls-that-run-in-c) | with it |",
        "|---|---|---|---|---|",
    ]
    for cure, one, other in zip(CURES, without_core, with_core, strict=True):
        eager = min(one["eager"], other["eager"])
        cells = (cure.loop_text, cure.cure_text, f"{eager:.2f}", _cell(one), _cell(other))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_table(rounds: int) -> int:
    """Measure all loops without the core and with it, each in a process of its own; write the table."""
    measured_rows, status = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for native in ("0", "require"):
            target = Path(folder) / f"{native}.json"
            print(f"LTC_NATIVE={native}", flush=True)
            command = [sys.executable, __file__, "--rounds", str(rounds), "--json", str(target)]
            done = subprocess.run(command, env=os.environ | {"LTC_NATIVE": native})
            status = max(status, done.returncode)
            measured_rows.append(json.loads(target.read_text()))
    PAGE.write_text(_TABLE.sub(lambda _: table(*measured_rows), PAGE.read_text(), count=1))
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="", help="part of the names of the loops to run")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each way")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--write", action="store_true", help="write the table of the page")
    asked = parser.parse_args()
    if asked.write:
        return write_table(asked.rounds)
    hints._say = lambda found: None
    hints.PATIENCE_SECONDS = PATIENCE_SECONDS
    chosen = [cure for cure in CURES if asked.name in cure.slow.__name__]
    told = [judged(cure, asked.rounds) for cure in chosen]
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row, _ in told]))
    return 1 if any(found for _, found in told) else 0


if __name__ == "__main__":
    sys.exit(main())
