"""The smallest network that still fails: less of everything, as long as it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.networks.network import Leaf, Network, Step, head, precision

SMALLER = (1, 2, 3, 5, 8, 16, 17, 32)
MOST_TRIES = 600


def shrunk(
    network: Network,
    fails: Callable[[Network], bool],
    tries: int = MOST_TRIES,
    found: Callable[[Network], object] = lambda network: None,
) -> Network:
    """A network that `fails`, of which nothing can be left out.

    tries  at most so many are tried
    found  is told of every smaller one
    """
    known = {network}

    def still_fails(candidate: Network) -> bool:
        if candidate in known or len(known) > tries:
            return False
        known.add(candidate)
        return fails(candidate)

    while smaller := next(filter(still_fails, _candidates(network)), None):
        network = smaller
        found(network)
    return network


def _candidates(network: Network) -> Iterator[Network]:
    """Networks with less in them, those with much less first."""
    yield from _simpler(network)
    yield from _fewer_ends(network)
    yield from _beginnings(network)
    yield from _fewer_steps(network)
    yield from _plainer_leaves(network)
    yield from _smaller(network)


def _simpler(network: Network) -> Iterator[Network]:
    plain = {
        "rounds": 1,
        "optimizer": "",
        "marks": frozenset(),
        "reads": frozenset(),
        "autocast": False,
        "threads": 1,
        "backward": "sum",
    }
    yield replace(network, **plain).pruned()
    for name, value in plain.items():
        yield replace(network, **{name: value}).pruned()
    for name in ("marks", "reads"):
        for one in sorted(getattr(network, name)):
            yield replace(network, **{name: getattr(network, name) - {one}})
    for dtype in ("float32", "float64"):
        yield replace(network, dtype=dtype, low="float32" if network.low == dtype else network.low)
    if network.rounds > 2:
        yield replace(network, rounds=2)


def _fewer_ends(network: Network) -> Iterator[Network]:
    yield _live(replace(network, losses=(), optimizer=""))
    for losses in _fewer(network.losses):
        for outputs in ((), network.outputs):
            yield _live(replace(network, losses=losses, outputs=outputs))
    for outputs in _fewer(network.outputs):
        yield _live(replace(network, outputs=outputs))
    yield _live(network)


def _fewer(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """One alone, then all but one."""
    yield from ((name,) for name in names)
    yield from (tuple(n for n in names if n != name) for name in names)


def _live(network: Network) -> Network:
    """Without the steps that no result needs; a write needs to be named to stay."""
    needed = {*network.outputs, *network.losses}
    kept = []
    for step in reversed(network.steps):
        if step.name in needed or ("_(" in step.template and needed & set(step.operands)):
            needed |= set(step.operands)
            kept.append(step)
    there = {step.name for step in kept}
    return replace(
        network,
        steps=tuple(reversed(kept)),
        outputs=tuple(n for n in network.outputs if n in there),
    ).pruned()


def _beginnings(network: Network) -> Iterator[Network]:
    """What comes until a step, which is the only result or the only loss."""
    values = _values(network)
    for k, step in enumerate(network.steps):
        x = values.get(step.name)
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            continue
        begun = replace(network, steps=network.steps[: k + 1], optimizer="")
        yield _live(replace(begun, outputs=(step.name,), losses=()))
        if step.name in network.losses or not network.losses:
            continue
        wide = "dtype" if x.dtype == precision(network.dtype) else "low"
        weights = Leaf(f"x{3000 + k}", "input", tuple(x.shape), 3000, wide)
        if weights in network.leaves:
            continue
        loss = Step("loss", "({0} * {1}).sum()", (step.name, weights.name))
        yield _live(
            replace(
                begun,
                leaves=(*network.leaves, weights),
                steps=(*begun.steps, loss),
                outputs=(),
                losses=(loss.name,),
            )
        )


def _fewer_steps(network: Network) -> Iterator[Network]:
    """A step's value is an operand of it, an earlier value, or a leaf."""
    values = _values(network)
    for k, step in enumerate(network.steps):
        yield _live(_without(network, k, step.name, None))
        x = values.get(step.name)
        if not isinstance(x, torch.Tensor):
            continue
        for name in step.operands:
            if _alike(values.get(name), x):
                yield _live(_without(network, k, name, None))
        if x.is_floating_point() and step.name not in network.losses:
            wide = x.dtype == precision(network.dtype)
            for kind in ("input", "parameter"):
                leaf = Leaf(
                    f"{'xp'[kind == 'parameter']}{1000 + k}",
                    kind,
                    tuple(x.shape),
                    2000 + k,
                    "dtype" if wide else "low",
                )
                yield _live(_without(network, k, leaf.name, leaf))


def _alike(x, y) -> bool:
    return isinstance(x, torch.Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)


def _without(network: Network, k: int, other: str, leaf: Leaf | None) -> Network:
    """Step k is gone; whoever took its value takes another, which may be a new leaf."""
    gone = network.steps[k].name
    steps = [
        replace(step, operands=tuple(other if n == gone else n for n in step.operands))
        for step in (*network.steps[:k], *network.steps[k + 1 :])
    ]
    outputs = tuple(n for n in network.outputs if n != gone)
    losses = tuple(n for n in network.losses if n != gone)
    leaves = (*network.leaves, leaf) if leaf else network.leaves
    return replace(network, leaves=leaves, steps=tuple(steps), outputs=outputs, losses=losses)


def _values(network: Network) -> dict:
    """What the CPU computes, by name; empty where it refuses."""
    names = head()
    names |= {
        "device": "cpu", "dtype": precision(network.dtype), "low": precision(network.low),
        "step": 0, "random": names["plainly"],
    }  # fmt: skip
    values: dict = {}
    try:
        for leaf in network.leaves:
            values[leaf.name] = eval(leaf.text(False), names)
        for step in network.steps:
            values[step.name] = eval(step.text(), names, values)
    except Exception:  # then the candidates that need no values are tried
        return {}
    return values


def _plainer_leaves(network: Network) -> Iterator[Network]:
    for k, leaf in enumerate(network.leaves):
        plainer = [
            replace(leaf, layout="", values="normal"),
            replace(leaf, layout=""),
            replace(leaf, values="normal"),
            replace(leaf, precision="dtype"),
        ]
        if leaf.kind == "parameter":
            plainer.append(replace(leaf, kind="input"))
        for other in plainer:
            leaves = (*network.leaves[:k], other, *network.leaves[k + 1 :])
            yield replace(network, leaves=leaves)


def _smaller(network: Network) -> Iterator[Network]:
    """Every size by itself becomes smaller, wherever it stands."""
    sizes = {n for leaf in network.leaves for n in (*leaf.shape, leaf.count)}
    for size in sorted(sizes, reverse=True):
        for other in SMALLER:
            if other < size:
                yield _resized(network, size, other)
    for k, step in enumerate(network.steps):  # what is left of numbers that stand in one place
        for name, value in step.attributes:
            if isinstance(value, float) and value != 1.0:
                attributes = tuple((n, 1.0 if n == name else v) for n, v in step.attributes)
                steps = (
                    *network.steps[:k],
                    replace(step, attributes=attributes),
                    *network.steps[k + 1 :],
                )
                yield replace(network, steps=steps)


def _resized(network: Network, size: int, other: int) -> Network:
    def resized(value):
        if isinstance(value, tuple):
            return tuple(resized(n) for n in value)
        return other if type(value) is int and value == size else value

    leaves = [
        replace(leaf, shape=resized(leaf.shape), count=resized(leaf.count))
        for leaf in network.leaves
    ]
    steps = [
        replace(step, attributes=tuple((name, resized(v)) for name, v in step.attributes))
        for step in network.steps
    ]
    return replace(network, leaves=tuple(leaves), steps=tuple(steps))
