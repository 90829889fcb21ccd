"""torch.compile on ltc, network by network: equal, one program a step, and how long a step's Python takes.

    python scripts/compare/compiled_networks.py                      twenty of timm and transformers
    python scripts/compare/compiled_networks.py --name "timm vit"    one

Each network trains twice from the same weights on the same batch: as it is, and by torch.compile(model).
Times are processor seconds of the thread that records, medians of steps that take turns. Ends with 1
where a loss or a parameter differs, or a compiled step is more programs than a plain one.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

os.environ.setdefault("LTC_TIER", "native")  # what is compared is what is compiled

import network_cases
import torch
import torch.utils._pytree as pytree
from network_check import Network

import ltc.core.lazy_model as ltm
from ltc.debug import metrics

TWENTY = """
    timm:resnet timm:convnext timm:efficientnet timm:mobilenetv3 timm:vit timm:swin timm:xcit
    timm:regnet timm:mambaout timm:starnet transformers:gpt2 transformers:llama transformers:qwen3
    transformers:gemma2 transformers:phi3 transformers:opt transformers:bloom transformers:bert
    transformers:t5 transformers:distilbert
""".split()
STEPS, RELATIVE = 8, 1e-4  # rounding may differ where graphs are cut elsewhere


@dataclass
class Run:
    """One model that trains; what its last steps were like."""

    step: Callable[[], torch.Tensor]
    losses: list[torch.Tensor] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def advance(self) -> None:
        with metrics.counted() as grown:
            start = time.thread_time()
            self.losses.append(self.step().detach())
            self.seconds.append(time.thread_time() - start)
            ltm.mark_step(wait=True)
        self.programs.append(grown["ExecuteTime"])


def running(model: torch.nn.Module, called: Callable, network: Network, batch: dict) -> Run:
    optimizer = network.optimizer(model.parameters())

    def step() -> torch.Tensor:
        torch.manual_seed(0)
        optimizer.zero_grad()
        loss, _ = network.loss_of(called, batch)
        loss.backward()
        optimizer.step()
        return loss

    return Run(step)


def compared(name: str) -> tuple[bool, str]:
    """Return True if the network passes, and its row."""
    network = network_cases.NETWORKS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = network.model().train().to("ltc")
    other = copy.deepcopy(model)
    batch = pytree.tree_map_only(torch.Tensor, lambda t: t.to("ltc"), network.batch())
    plain = running(model, model, network, batch)
    compiled = running(other, torch.compile(other), network, batch)
    for _ in range(STEPS):
        plain.advance()
        compiled.advance()
    expected = [*plain.losses, *(p.detach() for p in model.parameters())]
    found = [*compiled.losses, *(p.detach() for p in other.parameters())]
    worst = max(difference(x.cpu().double(), y.cpu().double()) for x, y in zip(expected, found))
    times = [statistics.median(run.seconds[STEPS // 2 :]) * 1e3 for run in (plain, compiled)]
    counts = plain.programs[-1], compiled.programs[-1]
    is_right = worst <= RELATIVE and counts[1] <= counts[0]
    return is_right, (
        f"| {name} | {worst:.1e} | {counts[0]} | {counts[1]} | {times[0]:.1f} | {times[1]:.1f} "
        f"| {times[1] / times[0]:.2f} |"
    )


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Relative to the larger of the two norms; 0 where both are nothing."""
    norm = max(expected.norm().item(), found.norm().item())
    return (expected - found).norm().item() / norm if norm > 1e-6 else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--name", nargs="+", help='such as "timm vit"; default: twenty')
    asked = parser.parse_args().name or [name.replace(":", " ") for name in TWENTY]
    warnings.filterwarnings("ignore")
    print("| network | difference | programs | compiled | ms | compiled ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    passed = 0
    for name in asked:
        try:
            is_right, row = compared(name)
        except Exception as error:
            traceback.print_exc()
            is_right, row = False, f"| {name} | {type(error).__name__} | | | | | |"
        passed += is_right
        print(row if is_right else f"{row} differs", flush=True)
    print(f"\n{passed} of {len(asked)}")
    return int(passed < len(asked))


if __name__ == "__main__":
    sys.exit(main())
