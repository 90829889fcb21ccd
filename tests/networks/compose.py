"""Whole networks of a seed: blocks, then losses, outputs, marks, reads and an optimizer."""

from __future__ import annotations

import itertools
import warnings

from tests.networks.blocks import BLOCKS as KINDS
from tests.networks.drawing import BLOCKS, DTYPES, Drawing, Refused, weighted
from tests.networks.expressions import LOSSES
from tests.networks.network import OPTIMIZERS, Network

# What the CPU says of calls that it refuses, or that do not exist for this value.
REFUSALS = (Refused, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
LIKINGS = (0, 0, 0, 1, 1, 4)
TRIES = 12  # of a block, for each that a network is to have


def drawn_network(seed: int, variation: int = 0) -> Network:
    """The network of a seed: always the same.

    variation  another one of the same seed, for where the CPU refuses the whole
    """
    for attempt in itertools.count():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return _attempt(f"{seed}.{variation}.{attempt}")
            except REFUSALS:
                continue


def _attempt(seed: str) -> Network:
    from_seed = Drawing(seed, "float32", False).r
    dtype = weighted(from_seed, DTYPES)
    d = Drawing(seed, dtype, from_seed.random() < 0.03)
    _put_blocks(d, weighted(d.r, BLOCKS))
    made = [n for n in d.floats() if n.startswith("v")]
    if not made:
        raise Refused
    count = d.r.choice((1, 1, 1, 2, 3))
    ends = list(dict.fromkeys([made[-1], *d.r.sample(made, min(count, len(made)) - 1)]))
    trained = d.r.random() < 0.93
    losses = [_loss(d, n) for n in ends] if trained else []
    losses = [n for n in losses if d.values[n].requires_grad and not d.values[n].dim()]
    trained = bool(losses)
    outputs = [n for n in ends if not trained or d.r.random() < 0.6]
    outputs += [n for n in made if n not in outputs and d.r.random() < 0.06]
    last = list(d.steps)[-1].name
    several = trained and d.r.random() < 0.16
    return Network(
        tuple(d.leaves), tuple(d.steps), tuple(outputs), tuple(losses),
        marks=_some(d, d.r.choice((0, 0, 0, 0.05, 0.15)), but=last),
        reads=_some(d, d.r.choice((0, 0, 0, 0, 0.04))) & set(d.floats()),
        dtype=dtype, low=d.low, backward=d.r.choice(("sum", "sum", "sum", "each", "grad")),
        optimizer=d.r.choice(list(OPTIMIZERS)) if several else "",
        rounds=d.r.choice((2, 3)) if several else 1,
        autocast=d.r.random() < 0.06, threads=d.r.choice((1, 1, 1, 2, 4)),
    ).pruned()  # fmt: skip


def _put_blocks(d: Drawing, count: int) -> None:
    # Some kinds often and some never, in each network others: so that what fails only where three
    # of a kind meet is met.
    kinds = [(kind, often * d.r.choice(LIKINGS)) for kind, often in KINDS]
    put = 0
    for _ in range(TRIES * count):
        if put == count:
            return
        saved = d.saved()
        try:
            weighted(d.r, kinds)(d, d.recent())
            put += 1
        except REFUSALS:
            d.restore(saved)


def _loss(d: Drawing, x: str) -> str:
    return d.step(d.r.choice(LOSSES), x, d.like(x))


def _some(d: Drawing, chance: float, but: str = "") -> frozenset[str]:
    return frozenset(s.name for s in d.steps if s.name != but and d.r.random() < chance)
