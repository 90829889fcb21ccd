"""Findings of LTC_VERIFY, as errors with a text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ltc.errors import VerificationError
from ltc.ir import ops
from ltc.ir.graph import Origin
from ltc.ir.node import Node
from ltc.ir.tensor_type import type_text
from ltc.runtime.verification.every_node import is_computed
from ltc.runtime.verification.judge import Finding

MOST_SHOWN = 16  # operands, and nodes of one kernel


def error_of(finding: Finding, origins: Mapping[Node, Origin], backend: str) -> VerificationError:
    node = finding.difference.node
    lines = [
        f"{node.op} giving {type_text(node.type)} {finding.fault}: {_elements(finding)}.",
        f"It is part of {asked_for(node, origins)}.",
        *_operand_lines(finding, origins),
        *_kernel_lines(finding, origins),
        f"This is a fault of ltc or of its backend {backend!r}, not of your program: please report "
        f"it with this text. LTC_BACKEND=eager runs the program on PyTorch's own CPU kernels.",
    ]
    return VerificationError("\n".join(lines), finding.difference, _origin(node, origins))


def _elements(finding: Finding) -> str:
    wrong = finding.difference
    where = f"element {list(wrong.position)}" if wrong.position else "it"
    return (
        f"{where} is {_number(wrong.found)} and should be {_number(wrong.expected)} "
        f"within {wrong.tolerance:.2g}; {wrong.count} of {wrong.node.size} elements are wrong"
    )


def _number(x: float | int | bool | complex) -> str:
    return f"{x:.9g}" if isinstance(x, (float, complex)) else str(x)


def asked_for(node: Node, origins: Mapping[Node, Origin]) -> str:
    return str(_origin(node, origins) or "a result of the program")


def _origin(node: Node, origins: Mapping[Node, Origin]) -> Origin | None:
    """Return the recorded call that a node belongs to, or that of its operands."""
    waiting, seen = [node], set[Node]()
    for one in waiting:
        if one in origins and one.op is not ops.INPUT:
            return origins[one]
        waiting.extend(n for n in one.inputs if n not in seen)
        seen.update(one.inputs)
    return None


def _operand_lines(finding: Finding, origins: Mapping[Node, Origin]) -> Iterator[str]:
    if finding.formula is None:
        return
    operands = finding.formula.operands
    if operands:
        yield "It is computed from:"
    for node in operands[:MOST_SHOWN]:
        name = f"  {node.op} {type_text(node.type)}: {range_text(finding.known[node])}"
        yield name if node.op is ops.INPUT else f"{name}, of {asked_for(node, origins)}"
    if len(operands) > MOST_SHOWN:
        yield f"  and {len(operands) - MOST_SHOWN} more"


def range_text(x: torch.Tensor) -> str:
    """Least, greatest and mean, and how many are no finite numbers."""
    if not x.numel():
        return "no elements"
    if x.is_complex():
        return f"absolute values {range_text(x.abs())}"
    numbers = x.to(torch.float64)
    finite = numbers[numbers.isfinite()]
    parts = []
    if finite.numel():
        parts = [f"from {finite.min():.6g} to {finite.max():.6g}", f"mean {finite.mean():.6g}"]
    if nans := int(numbers.isnan().sum()):
        parts.append(f"{nans} NaN")
    if infinite := int(numbers.isinf().sum()):
        parts.append(f"{infinite} infinite")
    return ", ".join(parts)


def _kernel_lines(finding: Finding, origins: Mapping[Node, Origin]) -> Iterator[str]:
    """Give the lines about the other nodes that the kernel computes."""
    formula = finding.formula
    nodes = [n for n in formula.nodes if is_computed(n)] if formula is not None else []
    if len(nodes) < 2:
        return
    yield "One kernel computes:"
    for node in nodes[:MOST_SHOWN]:
        yield f"  {node.op} {type_text(node.type)}, of {asked_for(node, origins)}"
    if len(nodes) > MOST_SHOWN:
        yield f"  and {len(nodes) - MOST_SHOWN} more"
