"""The reductions a collective can do, on CPU tensors, in the order of the members."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

OPERATIONS: dict[str, Callable] = {
    "sum": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
}
BITWISE = frozenset({"and", "or"})
ORDERED = frozenset({"min", "max"})
BLOCK_BYTES = 256 << 10  # two operands and two targets: what the second cache of a core holds
# Sums of these are held in float32 and rounded once.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def check_reduction(kind: str, dtype: torch.dtype) -> None:
    """Raise RuntimeError for a kind that does not exist, or not for this dtype."""
    if kind not in OPERATIONS:
        raise RuntimeError(
            f"Invalid reduce type: {kind}. There are {', '.join(sorted(OPERATIONS))}."
        )
    if kind in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"reduce type {kind!r} needs integers or bool, not {dtype}")
    if kind in ORDERED and dtype.is_complex:
        raise RuntimeError(f"reduce type {kind!r} needs numbers that have an order, not {dtype}")


def fold(kind: str, operands: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Each target becomes the reduction of the operands, in their order; all flat.

    A target may be one of the operands. It goes block by block, so that what is read, the result so
    far and the targets stay in the cache of one core.
    """
    operation, first = OPERATIONS[kind], operands[0]
    wide, block = _WIDE.get(first.dtype), BLOCK_BYTES // first.itemsize
    if len(operands) == 2 and len(targets) == 1 and wide is None:  # nothing is read twice
        operation(*operands, out=targets[0])
        return
    parts = [x.split(block) for x in (*operands, *targets)]
    running = torch.empty(
        min(block, first.numel()), dtype=wide or first.dtype, device="cpu"
    )  # not used where two operands have no wider type
    for blocks in zip(*parts):
        given, (result, *others) = blocks[: len(operands)], blocks[len(operands) :]
        so_far = running[: result.numel()]
        if wide is not None:
            given = (so_far.copy_(given[0]), *given[1:])
        total = given[0]
        for x in given[1:-1]:
            total = operation(total, x, out=so_far)
        if wide is None:
            operation(total, given[-1], out=result)
        else:
            result.copy_(operation(total, given[-1], out=so_far))
        for other in others:
            other.copy_(result)
