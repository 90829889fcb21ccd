"""Judges what a program's kernels make of what they read, while it is launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ltc.backends.verification.double_precision import Formula
from ltc.backends.verification.judgement import Difference, difference, unequal
from ltc.ir.node import Node
from ltc.support.observation import metrics

COMPUTED = "is computed wrong"
OVERWRITTEN = "was right, and was written over before the last kernel that reads it"


@dataclass(frozen=True)
class Finding:
    """An error that a kernel, a pass or the launch itself made.

    Attributes:
        difference: The value that is wrong.
        fault: The cause, in words.
        formula: The formula of the kernel, if it is at fault.
        known: The values that it read, and others.
    """

    difference: Difference
    fault: str
    formula: Formula | None = None
    known: Mapping[Node, torch.Tensor] = field(default_factory=dict)


class Judge:
    """See backends/interface.py's Observer; the first thing that is wrong is its `finding`."""

    def __init__(
        self,
        known: Mapping[Node, torch.Tensor],
        scalars: Sequence[Any],
        formulas: dict[tuple[Node, ...], Formula],
    ) -> None:
        """Begin without a finding.

        Args:
            known: The values of the inputs.
            formulas: The formulas that earlier launches of the program have found; this one adds some.
        """
        self.known = {node: value.clone() for node, value in known.items()}
        self.finding: Finding | None = None
        self._scalars, self._formulas = scalars, formulas

    def reads(self, node: Node, value: torch.Tensor) -> None:
        if self.finding is not None or node not in self.known:
            return
        if not same_bits(self.known[node], value):
            changed = unequal(node, self.known[node], value)
            if changed is not None:
                self.finding = Finding(changed, OVERWRITTEN)

    def makes(self, values: Mapping[Node, Any], is_reference: bool) -> None:
        made = {n: x.clone() for n, x in values.items() if isinstance(x, torch.Tensor)}
        if not is_reference and made and self.finding is None:
            self._judge(made)
        self.known.update(made)

    def _judge(self, made: dict[Node, torch.Tensor]) -> None:
        results = tuple(made)
        formula = self._formulas.get(results)
        if formula is None:
            formula = self._formulas[results] = Formula(results, self.known)
        if any(node.op.kind == "collective" for node in formula.nodes):
            metrics.count("verify.unjudged", len(results))
            return
        metrics.count("verify.nodes", len(formula.nodes))
        found = difference(formula, self.known, self._scalars, list(made.values()))
        if found is not None:
            self.finding = Finding(found, COMPUTED, formula, dict(self.known))


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(_bytes(x), _bytes(y))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)
