"""Runs an extern node: torch's own CPU kernel; what it returns shares no memory with its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, cast

import torch

from ltc.aten.schema import overload_named
from ltc.backends.kernel_call import KernelCall, kernel_call
from ltc.errors import InvalidGraph
from ltc.ir import ops
from ltc.ir.extern_call import Hole, Template, fill
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import TensorType, TupleType


def extern(node: Node) -> Callable[..., tuple[torch.Tensor | InvalidGraph, ...]]:
    """Return the function of an extern node: contiguous tensors of the recorded types.

    In place of a result of another shape there is an error, for its reader.
    """
    template: Template = node.attr("template")
    kernel = kernel_call(overload_named(template.overload))
    types = cast(TupleType, node.type)  # one of each result

    def compute(*operands: torch.Tensor) -> tuple[torch.Tensor | InvalidGraph, ...]:
        def value_of(hole: Hole) -> Any:
            return operands[hole.operand].item() if hole.number else operands[hole.operand]

        args = fill(template.args, value_of)
        kwargs = {name: fill(argument, value_of) for name, argument in template.kwargs}
        seed = None if template.seed is None else int(operands[template.seed].item())
        found = kernel.run(args, kwargs, template.mutated, template.returned, seed=seed)
        kept = [tensor for tensor, present in zip(found, template.present) if present]
        return tuple([_settled(t, type, operands, kernel) for t, type in zip(kept, types)])

    return compute


def sizes_made(node: Node) -> list[Any]:
    """All extents of all results of an extern node; none of another node's."""
    if node.op is not ops.EXTERN:
        return []
    return [extent for type in node.attr("results") for extent in type.shape]


def at_sizes(node: Node, places: Iterable[int], sizes: Sequence[int]) -> Node:
    """An extern node with these sizes in place of those of `sizes_made`; another node as it is."""
    extents = sizes_made(node)
    if not extents:
        return node
    for place, size in zip(places, sizes):
        extents[place] = int(size)
    rest = iter(extents)
    results = tuple(
        TensorType(type.dtype, tuple(islice(rest, len(type.shape))))
        for type in node.attr("results")
    )
    return make(ops.EXTERN, *node.inputs, template=node.attr("template"), results=results)


def element(results: tuple[torch.Tensor | InvalidGraph, ...], index: int) -> torch.Tensor:
    """One of what an extern node computes; raises its error where it is not as recorded."""
    result = results[index]
    if isinstance(result, InvalidGraph):
        raise result
    return result


def _settled(
    tensor: torch.Tensor | None,
    type: TensorType,
    operands: Sequence[torch.Tensor],
    kernel: KernelCall,
) -> torch.Tensor | InvalidGraph:
    """The tensor as a node's result is: of the recorded type, contiguous, sharing no memory."""
    if tensor is None or tuple(tensor.shape) != type.shape:
        got = None if tensor is None else list(tensor.shape)
        name = kernel.name.partition(".")[0]
        return InvalidGraph(
            f"{kernel.name} was recorded as giving {type}, as its Meta kernel says, and gave "
            f"shape {got} on the CPU. LTC_FORCE_FALLBACK={name}, set before the program starts, "
            f"runs it without asking that kernel."
        )
    result = kernel.settled(tensor, type.dtype).resolve_neg().contiguous()
    memory = result.untyped_storage().data_ptr()
    shared = any(memory == x.untyped_storage().data_ptr() for x in operands)
    return result.clone() if shared or result.untyped_storage().nbytes() > result.nbytes else result
