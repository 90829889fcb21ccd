"""Step functions at random: of modules, optimizers, numbers and writes, some of them impure.

Each is the text of a module with `make(compiled)`, which returns `call(number)` -> tensors.  What
changes between the calls is part of it: batch sizes, learning rates, modes, parameters.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import ltc
from ltc import config
from ltc.debug import metrics
from ltc.device.recording.recorder import device_at
from ltc.device.recording.sync import flush
from ltc.errors import StepDiffers

CALLS = 14
MOST = 100  # of an impure one, until a check falls on a call that is different
INTERVAL = 3  # of so many calls that could be replayed, one is checked
CHECKS = 16  # of what is different in one of four recordings, all of these miss it in a hundredth

OPTIMIZERS = [
    "torch.optim.SGD(parameters, lr=0.05)",
    "torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)",
    "torch.optim.Adam(parameters, lr=0.01)",
    "torch.optim.AdamW(parameters, lr=0.01, foreach=False)",
    "torch.optim.AdamW(parameters, lr=0.01, fused=True)",
    "torch.optim.RMSprop(parameters, lr=0.01)",
    "torch.optim.Adagrad(parameters, lr=0.02, lr_decay=0.1)",
    "torch.optim.RAdam(parameters, lr=0.01)",
]
LAYERS = ["nn.Tanh()", "nn.ReLU()", "nn.Dropout(0.3)", "nn.LayerNorm(6)", "nn.BatchNorm1d(6)",
          "nn.Linear(6, 6)", "nn.GELU()"]  # fmt: skip
LINES = [
    "x = x * scale",
    "x = x + (1 - scale) / 3",
    "x = x.sin() if scale > 0.4 else x.cos()",
    "x = x * float(int(scale * 4))",
    "x = x + table['bias']",
    "x = x * settings.factor",
    "x = x + F.dropout(x, 0.5)",
    "x = x - torch.rand_like(x)",
    "state.mul_(0.5).add_(x.detach().mean(0))",
    "x = x + state",
    "x = torch.cat([x, x.flip(0)])",
    "x = x[: max(2, x.shape[0] // 2)]",
    "x = x * number",
]
IMPURE = [
    "x = x * (1 + next(counted) // 5)",
    "x = x.exp() if next(counted) % 4 == 3 else x",
    "x = x + hidden.pop()",
    "x = x + random.random()",
    "x = x + torch.randn(6).to('ltc')",
    "x = x * (2 if x.sum().item() > 0 else 3)",
    "kept.append(x)",
]
BETWEEN = [
    "optimizer.param_groups[0]['lr'] *= 0.9",
    "optimizer.param_groups[0]['lr'] = 0.01 if n < 9 else 0.005",
    "model.train(n % 4 < 2)",
    "model.train(n < 7)",
    "model[0].weight.requires_grad_(n < 7)",
    "settings.factor = 2.0 if n < 6 else 3.0",
    "table['bias'] = torch.full((6,), float(n // 5)).to('ltc')",
    "state.zero_()",
    "model[0].bias.data = model[0].bias.data * (n == 6) if n == 6 else model[0].bias.data",
    "optimizer.load_state_dict(optimizer.state_dict()) if n == 8 else None",
    "pass",
]
ENDS = [
    "loss.detach()",
    "loss",
    "[loss.detach(), x.detach()]",
    "{'loss': loss, 'of': (x.detach(),)}",
]

TEMPLATE = """
import itertools, random
import torch, torch.nn as nn, torch.nn.functional as F

class Settings:
    factor = 2.0

def make(compiled):
    torch.manual_seed({seed})
    random.seed({seed})
    model = nn.Sequential({layers}).to("ltc")
    parameters = list(model.parameters())
    optimizer = {optimizer}
    settings, table = Settings(), {{"bias": torch.ones(6).to("ltc")}}
    state, kept, counted = torch.zeros(6).to("ltc"), [], itertools.count()
    hidden = [float(n > 5) for n in range(100)]

    @compiled
    def step(x, scale, number=1):
{lines}

    def call(n):
{between}
        x = torch.randn({rows}, 6, generator=torch.Generator().manual_seed(n)).to("ltc")
        found = step(x, {scale}, number={number})
        return [found, x, state, *model.parameters(), *model.buffers(), *[p.grad for p in parameters]]

    return call
"""


@dataclass
class StepFunction:
    """One function: its text, and whether it depends on more than what it is given."""

    text: str
    is_impure: bool

    def make(self, compiled: Callable) -> Callable[[int], Any]:
        names: dict[str, Any] = {"__name__": "random_step"}
        exec(compile(self.text, "random_step.py", "exec"), names)
        made: Callable[[int], Any] = names["make"](compiled)
        return made


def step_function(seed: int) -> StepFunction:
    draw = random.Random(seed)
    is_impure = draw.random() < 0.3
    lines = draw.sample(LINES, draw.randrange(1, 5))
    if is_impure:
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(IMPURE))
    trains = draw.random() < 0.7
    if trains:
        zeroes = draw.choice(
            ["optimizer.zero_grad()", "pass", "optimizer.zero_grad(set_to_none=False)"]
        )
        lines = [
            zeroes,
            *lines,
            "loss = model(x).square().mean()",
            "loss.backward()",
            "optimizer.step()",
        ]
        if draw.random() < 0.3:
            lines.append("optimizer.zero_grad()")
    else:
        lines += ["with torch.no_grad(): x = model(x)", "loss = x.sum()"]
    lines.append(f"return {draw.choice(ENDS)}")
    text = TEMPLATE.format(
        seed=seed,
        layers=", ".join(["nn.Linear(6, 6)", *draw.choices(LAYERS, k=2)]),
        optimizer=draw.choice(OPTIMIZERS),
        lines="\n".join(f"        {line}" for line in lines),
        between="\n".join(f"        {line}" for line in draw.sample(BETWEEN, draw.randrange(1, 3))),
        rows=draw.choice(["4", "4", "3 + n % 2", "4 if n < 8 else 5"]),
        scale=draw.choice(["0.5", "0.1 * n", "0.25 * (n // 4)", "0.7"]),
        number=draw.choice(["1", "2", "n // 6"]),
    )
    return StepFunction(text, is_impure)


def _values(found: Any) -> list[torch.Tensor]:
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        return [value for part in found for value in _values(part)]
    return [] if found is None else [found.detach().cpu().clone()]


def judged(seed: int) -> tuple[str, dict[str, int]]:
    """What is wrong with how the function of that seed is replayed, "" where nothing is; counts."""
    function = step_function(seed)
    with config.override(
        LTC_REPLAY_CHECK=INTERVAL, LTC_CHECK=0, LTC_TIER="native"
    ):  # the same bits
        plain = function.make(_recorded_alone)
        expected = [_values(plain(n)) for n in range(MOST if function.is_impure else CALLS)]
        with metrics.counted() as grown:
            fault = _fault(function, expected, grown) or _too_few_checks(grown)
    return fault, dict(grown)


def _too_few_checks(grown: Any) -> str:
    """What is wrong with how often calls were checked: what is hardly replayed is to be as well."""
    could, checks = _could_replay(grown), grown["ReplayChecks"]
    if checks >= could // INTERVAL:
        return ""
    return f"of {could} calls that could be replayed {checks} were checked"


def _fault(function: StepFunction, expected: list[list[torch.Tensor]], grown: Any) -> str:
    call, wrong_since, looked_at = function.make(ltc.compile), None, 0
    for n in range(len(expected)):
        try:
            found = _values(call(n))
        except StepDiffers as error:
            return "" if function.is_impure else f"call {n} raised: {error}"
        if wrong_since is None and not _equal(found, expected[n]):
            wrong_since, looked_at = n, _could_replay(grown)
        if wrong_since is not None and not function.is_impure:
            return f"call {n} is different"
        if wrong_since is None and n >= CALLS:
            return ""
    if wrong_since is None or grown["ReplayRefused"]:
        return ""
    if _could_replay(grown) - looked_at < CHECKS * INTERVAL:
        return ""  # hardly replayed, and so not checked either
    return f"call {wrong_since} was different, and nothing is said"


def _could_replay(grown: Any) -> int:
    count: int = grown["ReplayedCalls"] + grown["ReplayChecks"]
    return count


def _recorded_alone(function: Callable) -> Callable:
    """Its calls are recordings of their own, as those that may be replayed are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = device_at(0).recorder()
        flush(recorder)
        found = function(*args, **kwargs)
        flush(recorder)
        return found

    return call


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found, expected)
    )
