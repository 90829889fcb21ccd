"""Runs an extern node: torch's own CPU kernel, with nothing of its effects left behind.

Arguments that the kernel writes to are copies, a random one draws from the node's seed alone, and
what it returns shares no memory with its operands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch

from ltc.errors import InvalidGraph
from ltc.ir import ops
from ltc.ir.extern_call import Hole, Template, fill
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import TensorType, TupleType
from ltc.support.torch_private import schema_of_overload

_random_state = threading.Lock()  # held while the process's default generator is borrowed


def overload_named(name: str) -> Any:
    """The overload of "aten::add.Tensor"; raises AttributeError where this torch lacks it."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def extern(node: Node) -> Callable[..., tuple[torch.Tensor | InvalidGraph, ...]]:
    """What an extern node computes from its operands: contiguous tensors of the recorded types.

    In place of one that turns out of another shape there is an error, for whoever reads it.
    """
    template: Template = node.attr("template")
    overload = overload_named(template.overload)
    types = cast(TupleType, node.type)  # one of each result
    takes_generator = any(a.name == "generator" for a in schema_of_overload(overload).arguments)

    def compute(*operands: torch.Tensor) -> tuple[torch.Tensor | InvalidGraph, ...]:
        operands = tuple(x.contiguous() for x in operands)  # as lazy tensors appear
        args, kwargs = _arguments(template, operands)
        if template.seed is None:
            returned = overload(*args, **kwargs)
        else:
            seed = int(operands[template.seed].item())
            returned = _call_random(overload, args, kwargs, seed, takes_generator)
        written = [_argument(args, kwargs, place) for place in template.mutated]
        found = _tensors(written) + (_tensors(returned) if template.returned else [])
        kept = [tensor for tensor, present in zip(found, template.present) if present]
        return tuple(_settled(t, type, operands, template) for t, type in zip(kept, types))

    return compute


def _arguments(
    template: Template, operands: tuple[torch.Tensor, ...]
) -> tuple[list[Any], dict[Any, Any]]:
    def value_of(hole: Hole) -> Any:
        return operands[hole.operand].item() if hole.number else operands[hole.operand]

    args = fill(template.args, value_of)
    kwargs = {name: fill(argument, value_of) for name, argument in template.kwargs}
    for place in template.mutated:
        holder: Any = args if isinstance(place, int) else kwargs
        holder[place] = _cloned(holder[place])
    return args, kwargs


def _cloned(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_cloned(a) for a in argument]
    return argument if argument is None else argument.clone()


def _argument(args: list[Any], kwargs: dict[Any, Any], place: int | str) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]


def _call_random(
    overload: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seed: int,
    takes_generator: bool,
) -> Any:
    if takes_generator:
        generator = torch.Generator().manual_seed(seed)
        return overload(*args, **{**kwargs, "generator": generator})
    default = torch.default_generator
    with _random_state:
        before = default.get_state()
        try:
            default.manual_seed(seed)
            return overload(*args, **kwargs)
        finally:
            default.set_state(before)


def _tensors(value: Any) -> list[Any]:
    """What a call gives, flat; an undefined tensor is None, a number a 0-dim tensor."""
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    if value is None or isinstance(value, torch.Tensor):
        return [value]
    return [torch.tensor(value)]


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
    template: Template,
) -> torch.Tensor | InvalidGraph:
    """The tensor as a node's result is: of the recorded type, contiguous, sharing no memory."""
    if tensor is None or tuple(tensor.shape) != type.shape:
        got = None if tensor is None else list(tensor.shape)
        name = template.overload.partition(".")[0]
        return InvalidGraph(
            f"{template.overload} was recorded as giving {type}, as its Meta kernel says, and gave "
            f"shape {got} on the CPU. LTC_FORCE_FALLBACK={name}, set before the program starts, "
            f"runs it without asking that kernel."
        )
    result = tensor.to(type.dtype).resolve_conj().resolve_neg().contiguous()
    memory = result.untyped_storage().data_ptr()
    shared = any(memory == x.untyped_storage().data_ptr() for x in operands)
    return result.clone() if shared or result.untyped_storage().nbytes() > result.nbytes else result
