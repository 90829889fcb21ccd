"""Ten slow loops and their cures: what ltc says of each, and the time of an iteration before and after.

    python scripts/bench/cures.py              # all of them: about two minutes
    python scripts/bench/cures.py --name read  # those with "read" in their name

Each loop runs as users have it, with LTC_TIER=auto. The two ways run in turns. Of each the fastest round
counts, in processor time of all threads of this process; where the cure takes waiting away, on the clock. Exits
with 1 if the profile or the hint names another cure than the one that is applied, or if a cure does not help.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import ltc
import ltc.core.lazy_model as ltm
from ltc.device.evidence import hints
from ltc.profiling.analysis.hindrances import hindrances

WARM, ITERATIONS, ROUNDS = 100, 200, 15
Loop = Callable[[int], object]


class Training:
    """A small network, its optimizer and a batch on the device."""

    def __init__(self, width: int = 256) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(64, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 10)
        self.model = nn.Sequential(*layers).to("ltc")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(64, 64).to("ltc")
        self.y = torch.randint(10, (64,)).to("ltc")

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, backward and the optimizer's step; return output and loss."""
        self.optimizer.zero_grad()
        output = self.model(self.x)
        loss = F.cross_entropy(output, self.y)
        loss.backward()
        self.optimizer.step()
        return output, loss


def reads_in_the_step(n: int) -> None:
    training = Training()
    for _ in range(n):
        training.optimizer.zero_grad()
        loss = F.cross_entropy(training.model(training.x), training.y)
        loss.item()
        loss.backward()
        training.optimizer.step()
        ltm.mark_step()


def reads_behind_the_mark(n: int) -> None:
    training = Training()
    for _ in range(n):
        _, loss = training.step()
        ltm.mark_step()
        loss.item()


def reads_without_a_mark(n: int) -> None:
    training = Training()
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


def computes_behind_the_mark(n: int) -> None:
    training = Training()
    for _ in range(n):
        output, loss = training.step()
        ltm.mark_step()
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


def samples_one_by_one(n: int) -> list[int]:
    return _sampled(n, "ltc")


def samples_on_the_cpu(n: int) -> list[int]:
    return _sampled(n, "cpu")


def evaluates_by_reads(n: int) -> float:
    training, right = Training(), 0
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


def selects_by_a_mask(n: int) -> None:
    training = Training()
    for _ in range(n):
        training.optimizer.zero_grad()
        losses = F.cross_entropy(training.model(training.x), training.y, reduction="none")
        losses[losses > 2].sum().backward()
        training.optimizer.step()
        ltm.mark_step()


def multiplies_by_the_mask(n: int) -> None:
    training = Training()
    for _ in range(n):
        training.optimizer.zero_grad()
        losses = F.cross_entropy(training.model(training.x), training.y, reduction="none")
        (losses * (losses > 2)).sum().backward()
        training.optimizer.step()
        ltm.mark_step()


def decides_in_python(n: int) -> None:
    training, scale = Training(), torch.ones((), device="ltc")
    for _ in range(n):
        _, loss = training.step()
        scale = scale * 0.5 if loss > 2 else scale * 1.01
        ltm.mark_step()


def decides_on_the_device(n: int) -> None:
    training, scale = Training(), torch.ones((), device="ltc")
    for _ in range(n):
        _, loss = training.step()
        scale = torch.where(loss > 2, scale * 0.5, scale * 1.01)
        ltm.mark_step()


def clips_by_a_read(n: int) -> None:
    training = Training()
    for _ in range(n):
        training.optimizer.zero_grad()
        F.cross_entropy(training.model(training.x), training.y).backward()
        norm = torch.stack([p.grad.norm() for p in training.model.parameters()]).norm().item()
        for parameter in training.model.parameters():
            parameter.grad.mul_(min(1.0, 1.0 / norm))
        training.optimizer.step()
        ltm.mark_step()


def clips_on_the_device(n: int) -> None:
    training = Training()
    for _ in range(n):
        training.optimizer.zero_grad()
        F.cross_entropy(training.model(training.x), training.y).backward()
        norm = torch.stack([p.grad.norm() for p in training.model.parameters()]).norm()
        for parameter in training.model.parameters():
            parameter.grad.mul_((1.0 / norm).clamp(max=1.0))
        training.optimizer.step()
        ltm.mark_step()


def logs_in_the_step(n: int) -> None:
    training, log = Training(), []
    for _ in range(n):
        output, loss = training.step()
        log.append((loss.item(), output.std().item()))
        ltm.mark_step()


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
        time.sleep(5e-4)
        return torch.full((64,), float(number % 7))


def _trains_on_files(n: int, workers: int) -> None:
    training = Training()
    loader = DataLoader(Files(), batch_size=8, num_workers=workers)
    for x in itertools.islice(loader, n):
        training.optimizer.zero_grad()
        training.model(x.to("ltc")).square().mean().backward()
        training.optimizer.step()
        ltm.mark_step()


def waits_for_its_files(n: int) -> None:
    _trains_on_files(n, 0)


def reads_files_in_workers(n: int) -> None:
    _trains_on_files(n, 2)


@dataclass(frozen=True)
class Cure:
    """A slow loop, the cured one, and words that ltc's cure for the slow one has.

    Attributes:
        seconds: The time that the cure takes less of.
        is_hinted: False if eager PyTorch is as slow, so that the line on stderr does not come.
    """

    slow: Loop
    cured: Loop
    words: str
    seconds: Callable[[], float] = time.process_time
    is_hinted: bool = True


CURES = (
    Cure(reads_in_the_step, reads_behind_the_mark, "read it after ltm.mark_step()"),
    Cure(reads_without_a_mark, marks_and_reads_behind, "call ltm.mark_step() after"),
    Cure(computes_behind_the_mark, computes_before_the_mark, "compute this value before"),
    Cure(samples_one_by_one, samples_on_the_cpu, "run this loop on the CPU"),
    Cure(evaluates_by_reads, evaluates_on_the_device, "read once behind the loop"),
    Cure(selects_by_a_mask, multiplies_by_the_mask, "multiply by the mask"),
    Cure(decides_in_python, decides_on_the_device, "torch.where"),
    Cure(clips_by_a_read, clips_on_the_device, "keep decisions on the device"),
    Cure(logs_in_the_step, logs_in_a_step_closure, "in a step closure"),
    Cure(waits_for_its_files, reads_files_in_workers, "num_workers", time.perf_counter, False),
)


def milliseconds(loop: Loop, seconds: Callable[[], float]) -> float:
    """Return the time of an iteration, the making of the network included in both ways."""
    ltm.mark_step(wait=True)
    began = seconds()
    loop(ITERATIONS)
    ltm.mark_step(wait=True)
    return (seconds() - began) / ITERATIONS * 1e3


def said_of(loop: Loop) -> tuple[list[str], str]:
    """Return the cures that a profile names for a loop, and that of its hint.

    Each runs it in a thread that has recorded nothing yet; the hint is the one of a loop that was found slow.
    """
    hinted: list[str] = []

    def watched() -> None:
        loop(ITERATIONS)
        found = hints._watch.loop
        hinted.append(hints.cause_of(found).cure if found is not None else "")

    with tempfile.TemporaryDirectory() as folder, ltc.profile(f"{folder}/profile.json") as run:
        _in_a_thread(lambda: loop(ITERATIONS))
    _in_a_thread(watched)
    return [one.cure for one in hindrances(run.trace) if one.name != "recording-bound"], hinted[0]


def _in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def judged(cure: Cure, rounds: int) -> bool:
    """Print a row; return True if ltc names the cure and the cure helps."""
    said, hint = said_of(cure.slow)
    named = any(cure.words in one for one in said)
    hinted = cure.words in hint or not cure.is_hinted
    for loop in (cure.slow, cure.cured):
        loop(WARM)
    before, after = [], []
    for _ in range(rounds):
        before.append(milliseconds(cure.slow, cure.seconds))
        after.append(milliseconds(cure.cured, cure.seconds))
    helps = min(after) < min(before)
    print(
        f"{cure.slow.__name__:26} {min(before):7.2f} ms, {min(after):7.2f} with the cure "
        f"({min(before) / min(after):.2f}x)  {'named' if named else f'NOT NAMED: {said}'}, "
        f"{'hinted' if hinted else f'HINT: {hint}'}",
        flush=True,
    )
    return named and hinted and helps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="", help="part of the names of the loops to run")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of either way")
    asked = parser.parse_args()
    hints._say = lambda loop: None  # no line in the midst of the table, nor the last one to come
    chosen = [cure for cure in CURES if asked.name in cure.slow.__name__]
    return 0 if all([judged(cure, asked.rounds) for cure in chosen]) else 1


if __name__ == "__main__":
    sys.exit(main())
