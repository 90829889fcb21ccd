"""Small steps: eager PyTorch, ltc, ltc replayed by ltc.compile, and torch.compile, in turns.

    python scripts/bench/replay_bench.py [STEP ...] [--systems eager,ltc,replay,compile] [--rounds 9]
                                         [--threads 2]

`tiny` is a training step of a small perceptron, `operations` 200 small operations and a read,
`adamw` an optimizer's step over 120 tensors. Of eager and its optimizers the quickest way counts.
Medians of the rounds in microseconds a step, and multiples of eager's: above 1 is a loss.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import ltc

Step = Callable[[], object]
WAYS: dict[str, list[dict]] = {
    "tiny": [{}, {"foreach": True}, {"fused": True}],
    "operations": [{}],
    "adamw": [{}, {"foreach": True}, {"fused": True}],
}
STEPS = {"tiny": 200, "operations": 100, "adamw": 20}  # of a round
WARM_ROUNDS = 3


def tiny(device: str, compiled: Callable, **options: bool) -> Step:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **options)
    x, y = torch.randn(4, 8).to(device), torch.randn(4, 2).to(device)

    @compiled
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return lambda: step(x, y)


def operations(device: str, compiled: Callable) -> Step:
    x = torch.randn(64).to(device)

    @compiled
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = x * 1.001 + 0.001
        return x.sum()

    return lambda: step(x).item()


def adamw(device: str, compiled: Callable, **options: bool) -> Step:
    parameters = [nn.Parameter(torch.randn(64, 64).to(device)) for _ in range(120)]
    for parameter in parameters:
        parameter.grad = torch.randn(64, 64).to(device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, **options)

    @compiled
    def step() -> None:
        optimizer.step()

    return step


MAKERS: dict[str, Callable[..., Step]] = {"tiny": tiny, "operations": operations, "adamw": adamw}
COMPILED: dict[str, Callable] = {
    "eager": lambda function: function,
    "ltc": lambda function: function,
    "replay": ltc.compile,
    "compile": torch.compile,
}


def rounds_of(name: str, systems: list[str], rounds: int) -> dict[str, float]:
    """Microseconds a step: of each system its quickest way, by the median of the rounds."""
    runs: dict[tuple[str, int], Callable[[], float]] = {}
    for system in systems:
        device = "ltc" if system in ("ltc", "replay") else "cpu"
        for way, options in enumerate(WAYS[name]):
            torch.manual_seed(0)
            step = MAKERS[name](device, COMPILED[system], **options)
            runs[system, way] = lambda step=step, device=device: seconds_of(
                step, device, STEPS[name]
            )
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for number in range(WARM_ROUNDS + rounds):
        for key, run in runs.items():
            seconds = run()
            if number >= WARM_ROUNDS:
                taken[key].append(seconds / STEPS[name] * 1e6)
    medians = {key: statistics.median(times) for key, times in taken.items()}
    return {s: min(v for (system, _), v in medians.items() if system == s) for s in systems}


def seconds_of(step: Step, device: str, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        step()
        if device == "ltc":
            ltc.sync()
    if device == "ltc":
        ltc.sync(wait=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "steps", nargs="*", default=list(MAKERS), help="step functions to run; default: all"
    )
    parser.add_argument(
        "--systems",
        default="eager,ltc,replay,compile",
        help="the systems to compare, separated by commas",
    )
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds")
    parser.add_argument("--threads", type=int, default=2, help="number of threads")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    for name in chosen.steps:
        found = rounds_of(name, chosen.systems.split(","), chosen.rounds)
        base = found.get("eager", next(iter(found.values())))
        row = [f"{system} {us:7.1f} us ({us / base:.2f})" for system, us in found.items()]
        print(f"{name:12}", "  ".join(row), flush=True)


if __name__ == "__main__":
    main()
