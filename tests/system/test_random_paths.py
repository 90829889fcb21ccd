"""Steps at random that repeat, branch and leave their paths give what the CPU gives, in every state."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.debug import metrics
from tests.drawn import seeds
from tests.recorders import process_of_one_device

DRAWN, STEPS, BODIES = 4, 40, 3
State = dict[str, torch.Tensor]
Part = Callable[[State], Any]


@pytest.fixture(autouse=True)
def auto(monkeypatch) -> Iterator[None]:
    """As in a process of one device that was told nothing."""
    with process_of_one_device(LTC_TIER="auto", LTC_CACHE=0):
        yield


def put(name: str, made: Part) -> Part:
    return lambda s: s.__setitem__(name, made(s))


# Values that go on from step to step, views that are held meanwhile, and writes through both.
PARTS: list[Part] = [
    put("w", lambda s: s["w"] * 0.9 + 0.1),
    lambda s: s["w"].mul_(0.95),
    lambda s: s["column"].add_(s["w"][0, :2].mean()),
    lambda s: s["w"][1:].copy_(s["x"][:2]),
    put("x", lambda s: (s["x"] @ s["m"]).tanh()),
    put("m", lambda s: s["m"].t().contiguous() * 0.5 + 0.1),
    lambda s: torch.add(s["w"], 1, out=s["out"]),
    lambda s: s["out"].t()[0].zero_(),
    put("part", lambda s: s["w"].view(-1)[2:8].clone()),
    lambda s: s["part"].sub_(s["x"].sum()),
    lambda s: torch._foreach_mul_([s["w"], s["out"]], 0.9),
    put("column", lambda s: s["w"][:, 1]),
    lambda s: s["w"].data.clamp_(-2, 2),
    put("x", lambda s: torch.cat([s["x"][1:], s["w"][:1] * 0.5])),
    put("turned", lambda s: s["w"].t()),
    lambda s: s["turned"].mul_(0.5),
    put("x", lambda s: torch.where(s["x"] > 0, s["x"], s["x"] * 0.1)),
    lambda s: s["out"].index_add_(0, s["rows"], s["x"][:2]),
]


def beginning(device: str, seed: int) -> State:
    g = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(3, 4, generator=g) for name in "wx"}
    made |= {"m": torch.randn(4, 4, generator=g) * 0.4, "out": torch.zeros(3, 4)}
    made |= {"part": torch.ones(6), "rows": torch.tensor([0, 2])}
    there = {name: x.to(device) for name, x in made.items()}
    return {**there, "column": there["w"][:, 0], "turned": there["w"].t()}


def steps(draw: random.Random) -> Iterator[list[Part]]:
    """Most are one of a few bodies behind a common beginning; some leave it in the midst."""
    common = draw.choices(PARTS, k=draw.randint(1, 6))
    bodies = [draw.choices(PARTS, k=draw.randint(2, 9)) for _ in range(BODIES)]
    for _ in range(STEPS):
        body = draw.choices([*bodies, None], [6, 2, 1, 1])[0]
        if body is None:
            yield [*common[: draw.randint(0, len(common))], draw.choice(PARTS)]
        else:
            yield common + body


def compare(seed: int) -> None:
    draw = random.Random(f"paths {seed}")
    here, there = beginning("ltc:0", seed), beginning("cpu", seed)
    for number, parts in enumerate(steps(draw)):
        read_at = draw.choice([*[None] * 6, draw.randrange(len(parts))])
        for place, part in enumerate(parts):
            part(here), part(there)
            if place == read_at:
                assert here["w"].sum().item() == pytest.approx(there["w"].sum().item(), 1e-3, 1e-3)
        kept = (here["x"] + 1, there["x"] + 1) if draw.random() < 0.1 else None
        ltm.mark_step()
        if kept is not None:
            torch.testing.assert_close(kept[0].cpu(), kept[1], rtol=1e-3, atol=1e-3)
        if number % 7 == 0 or number > STEPS - 5:
            for name, x in there.items():
                torch.testing.assert_close(
                    here[name].cpu(), x, rtol=1e-3, atol=1e-3,
                    msg=lambda text: f"seed {seed}, step {number}, {name}: {text}",
                )  # fmt: skip


@pytest.mark.parametrize("seed", seeds(DRAWN))
def test_steps_at_random_are_the_cpus(seed):
    compare(seed)


def test_they_pass_through_every_state():
    counts: Counter[str] = Counter()
    for seed in (1, 2):
        with metrics.counted() as grown:
            compare(seed)
        counts.update({name: grown[name] for name in ("ImmediateSteps", "SideExits", "TierUp")})
        counts["ExecuteTime"] += grown["ExecuteTime"]
    assert min(counts[name] for name in ("ImmediateSteps", "SideExits", "TierUp")) >= 2, counts
    assert counts["ExecuteTime"] >= 10
