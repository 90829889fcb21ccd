"""Judge whether the values that a backend made of others are right, and find the wrong ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ltc.backends.verification.double_precision import Formula, widen
from ltc.backends.verification.perturbation import Perturbation, is_inexact
from ltc.ir.node import Node

SAMPLES = 8  # taken one by one, as long as there is a doubt
ALLOWED = 8  # times what the errors of the samples carry
# Of two computations in double: of a value, and times what errors of rounding carry anywhere.
DOUBLE_RELATIVE, DOUBLE_ALLOWED = 1e-9, 1e4


@dataclass(frozen=True)
class Difference:
    """One value of a backend that is wrong.

    Attributes:
        node: The node of the value.
        position: The position of the element that is furthest off.
        found: The backend's value there.
        expected: The exact value, rounded.
        tolerance: The greatest correct distance from it.
        count: Number of wrong elements.
    """

    node: Node
    position: tuple[int, ...]
    found: float | int | bool | complex
    expected: float | int | bool | complex
    tolerance: float
    count: int


def difference(
    formula: Formula,
    known: Mapping[Node, torch.Tensor],
    scalars: Sequence[Any],
    found: Sequence[torch.Tensor],
) -> Difference | None:
    """Return the first of the formula's results that does not follow from the known values, if any.

    Args:
        found: The backend's value of each result.
    """
    exact = formula.values(known, scalars)
    allowed = [_always_allowed(n, x) for n, x in zip(formula.results, exact)]
    away = [deviation(widen(x), y) for x, y in zip(found, exact)]
    for number in range(SAMPLES):
        if _all_within(away, allowed):
            return None
        sample = formula.values(known, scalars, Perturbation(number))
        allowed = [
            torch.maximum(a, ALLOWED * deviation(s, x)) for a, s, x in zip(allowed, sample, exact)
        ]
    if _all_within(away, allowed):
        return None
    return _first_wrong(formula.results, found, exact, away, allowed)


def _all_within(away: list[torch.Tensor], allowed: list[torch.Tensor]) -> bool:
    return all((a <= b).all() for a, b in zip(away, allowed))


def _always_allowed(node: Node, exact: torch.Tensor) -> torch.Tensor:
    """Two units in the last place, and what is too small to be a normal number.

    Of float16 that would be much; it is computed in float32, where it is normal.
    """
    if not is_inexact(node.dtype):
        return torch.zeros(exact.shape, dtype=torch.float64)
    limits = torch.finfo(node.dtype)
    least = limits.tiny * (limits.eps if node.dtype == torch.float16 else 1)
    return 2 * limits.eps * _finite_size(exact) + 2 * least


def _first_wrong(
    nodes: Sequence[Node],
    found: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    away: Sequence[torch.Tensor],
    allowed: Sequence[torch.Tensor],
) -> Difference:
    for node, mine, theirs, a, b in zip(nodes, found, exact, away, allowed):
        wrong = a > b
        if wrong.any():
            break
    excess = torch.where(wrong, a - torch.where(torch.isfinite(b), b, 0), -1)
    flat = int(excess.reshape(-1).argmax())
    position = tuple(int(i) for i in np.unravel_index(flat, tuple(wrong.shape)))
    return Difference(
        node,
        position,
        mine[position].item(),
        theirs[position].item(),
        b[position].item(),
        int(wrong.sum()),
    )


def unequal(node: Node, expected: torch.Tensor, found: torch.Tensor) -> Difference | None:
    """Return where two values of a node are not the same number, if anywhere."""
    exact = widen(expected)
    away = deviation(widen(found), exact)
    if not away.any():
        return None
    return _first_wrong([node], [found], [exact], [away], [torch.zeros_like(away)])


def far_apart(
    nodes: Sequence[Node],
    exact: Sequence[torch.Tensor],
    other: Sequence[torch.Tensor],
    sample: Sequence[torch.Tensor],
) -> Difference | None:
    """Return where two computations in double precision differ by more than their rounding.

    Args:
        sample: A third one, with errors in each value: what they carry to is what rounding may be.
    """
    away = [deviation(x, y) for x, y in zip(other, exact)]
    allowed = [
        DOUBLE_RELATIVE * _finite_size(x) + DOUBLE_ALLOWED * _largest(deviation(s, x))
        if is_inexact(x.dtype)
        else deviation(s, x)
        for s, x in zip(sample, exact)
    ]
    if _all_within(away, allowed):
        return None
    return _first_wrong(nodes, other, exact, away, allowed)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return _finite_size(x).max() if x.numel() else x.sum()


def _finite_size(x: torch.Tensor) -> torch.Tensor:
    """Absolute values, 0 for what is no finite number."""
    return torch.where(torch.isfinite(x), x.abs(), 0)


def deviation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """|x - y|, 0 where both are the same infinity or NaN, infinite where only one is."""
    if not is_inexact(x.dtype):
        return torch.where(x == y, 0.0, (x.to(torch.float64) - y.to(torch.float64)).abs() + 0.5)
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(same, 0.0, torch.nan_to_num((x - y).abs(), nan=torch.inf, posinf=torch.inf))
