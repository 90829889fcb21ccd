"""What each kernel of a compiled program does: found by planning its graph again, which is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ltc.backends.capabilities import KernelFacts
from ltc.backends.llvm.plan import PlannedRun, ReferenceCall, kernels_of
from ltc.backends.llvm.schedule import ProgramStep
from ltc.ir import ops
from ltc.ir.graph import Graph, Origin
from ltc.ir.loop_nest import READS, Kernel, Product
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.native.kernel_cache import kernel_name

MOST_NODES = 4096  # that one kernel is looked through for: it stands for a few dozen


def facts_of_program(
    graph: Graph, donated: frozenset[int], checked: bool, runs: Sequence[PlannedRun]
) -> list[KernelFacts] | None:
    """Of each call of `runs`, in order; None where these are of another graph."""
    planned = list(kernels_of(graph, donated, checked))
    names = [name for run in runs for name in _names(run)]
    if [None if code is None else kernel_name(code.text) for _, code in planned] != names:
        return None
    last = {id(step): _main_code(step) for step, _ in planned}
    return [_facts(graph, step, code, last[id(step)]) for step, code in planned]


def _names(run: PlannedRun) -> Iterable[str | None]:
    return (None,) if isinstance(run, ReferenceCall) else (call.kernel for call in run)


def _main_code(step: ProgramStep) -> KernelCode | None:
    """Of a step with several kernels the one that computes: the others pack, or copy."""
    return max(step.codes, key=lambda code: len(code.text), default=None)


def _facts(
    graph: Graph, step: ProgramStep, code: KernelCode | None, main: KernelCode | None
) -> KernelFacts:
    nodes = _nodes_of(step)
    origins = [graph.origins[node] for node in nodes if node in graph.origins]
    first = origins[0] if origins else Origin("", "")
    modules = _unique(origin.module_path for origin in origins)
    name = summary(step)
    is_main = code is main
    if code is not None and len(step.codes) > 1 and not is_main:
        name = f"part {step.codes.index(code) + 1} of {name}"
    reads, writes = _touched(step, code)
    return KernelFacts(
        name=name,
        ops=_unique(origin.overload for origin in origins if origin.overload != "ltc::input"),
        line=first.line,
        forward=first.forward,
        lines=_unique(origin.forward or origin.line for origin in origins),
        module=next(iter(modules), ""),
        modules=modules,
        read_bytes=reads,
        written_bytes=writes,
        multiply_adds=multiply_adds(step.unit) if is_main else 0,
        operations=_operations(step.unit) if is_main else 0,
        tasks=1 if code is None else code.tasks,
        is_double=any(_itemsize(node) == 8 for node in step.writes),
    )


def _unique(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in words if word))


# --- what a kernel stands for --------------------------------------------------------------------


def _nodes_of(step: ProgramStep) -> list[Node]:
    """The nodes that the step computes, the main one first."""
    first = step.unit.node if isinstance(step.unit, Product) else None
    found = dict.fromkeys([] if first is None else [first])
    waiting = [*step.writes]
    ends = set(step.reads)
    while waiting and len(found) < MOST_NODES:
        node = waiting.pop()
        if node in found and node is not first:
            continue
        found[node] = None
        if node is not first:
            waiting.extend(n for n in node.inputs if n not in ends and n.op is not ops.INPUT)
    if first is not None:
        waiting = [n for n in first.inputs if n not in ends and n.op is not ops.INPUT]
        found.update(dict.fromkeys(waiting))
    return list(found)


def summary(step: ProgramStep) -> str:
    """ "matmul [64, 32] [32, 10] then [64 10] 2->1 add maximum": what it computes, of what shapes."""
    unit = step.unit
    if isinstance(unit, Product):
        operands = " ".join(_shape_text(node) for node in unit.node.inputs)
        follows = f" then {nest_text(unit.epilogue)}" if unit.epilogue else ""
        return f"{unit.node.op.name} {operands}{follows}"
    if isinstance(unit, Kernel):
        return nest_text(unit)
    operands = " ".join(_shape_text(node) for node in unit.inputs)
    name = unit.attr("template").overload if unit.op is ops.EXTERN else unit.op.name
    return f"{name} {operands}, by PyTorch"


def _shape_text(node: Node) -> str:
    return str(list(node.shape)) if isinstance(node.type, TensorType) else "[...]"


def nest_text(kernel: Kernel) -> str:
    """The space of a loop nest, a bar before what it reduces, and how often it does what."""
    space = [str(extent) for extent in kernel.space]
    if kernel.depth < len(space):
        space.insert(kernel.depth, "|")
    did = Counter(
        value.op.name if value.op else value.kind
        for value in kernel.values()
        if value.kind not in ("constant", "load")
    )
    what = " ".join(name if n == 1 else f"{n}*{name}" for name, n in did.most_common(9))
    sides = f"{len(kernel.reads())}->{len(kernel.writes())}"
    return f"[{' '.join(space)}] {sides} {what or 'copy'}"


# --- how much it does ----------------------------------------------------------------------------


def _touched(step: ProgramStep, code: KernelCode | None) -> tuple[int, int]:
    """Bytes that it reads and writes, each element once, as far as its loops reach."""
    made = set(step.writes)
    if code is None:
        return sum(map(_nbytes, step.reads)), sum(map(_nbytes, made))
    most = _reached(step)
    nodes = dict.fromkeys(code.nodes)
    given = [node for node in nodes if node not in made and _is_memory(node)]
    return (
        sum(min(_nbytes(node), most.get(node, _nbytes(node))) for node in given),
        sum(_nbytes(node) for node in nodes if node in made),
    )


def _is_memory(node: Any) -> bool:
    return isinstance(node, Node) or hasattr(node, "nbytes")


def _reached(step: ProgramStep) -> Mapping[Node, int]:
    """Of what a loop nest loads, the most bytes that it can reach."""
    if not isinstance(step.unit, Kernel):
        return {}
    loads = Counter(v.data[0] for v in step.unit.values() if v.kind in READS)
    points = prod(step.unit.space)
    return {node: count * points * _itemsize(node) for node, count in loads.items()}


def _itemsize(node: Node) -> int:
    return node.type.dtype.itemsize if isinstance(node.type, TensorType) else 0


def _nbytes(node: Any) -> int:
    if not isinstance(node, Node):
        return int(getattr(node, "nbytes", 0))
    return node.size * _itemsize(node) if isinstance(node.type, TensorType) else 0


def _operations(unit: Any) -> int:
    """One for each elementwise or reducing operation at each point."""
    nest = unit.epilogue if isinstance(unit, Product) else unit
    if isinstance(nest, Kernel):
        return prod(nest.space) * sum(value.op is not None for value in nest.values())
    if isinstance(unit, Node) and isinstance(unit.type, TensorType):
        return unit.size
    return 0


def multiply_adds(unit: Any) -> int:
    """Of a product, by its shapes; 0 of anything else."""
    node = unit.node if isinstance(unit, Product) else unit
    count = _MULTIPLY_ADDS.get(node.op) if isinstance(node, Node) else None
    return 0 if count is None else int(count(node))


def _of_matmul(node: Node) -> int:
    return node.size * node.inputs[0].shape[-1]


def _of_convolution(node: Node) -> int:
    return node.size * prod(node.inputs[1].shape[1:])


def _of_input_gradient(node: Node) -> int:
    return node.inputs[0].size * prod(node.inputs[1].shape[1:])


def _of_weight_gradient(node: Node) -> int:
    return node.inputs[0].size * prod(node.shape[1:])


def _of_attention(operands: Sequence[Node], causal: bool, products: int) -> int:
    """`operands`: query, key, value; `products`: how many there are, of one's size or the other's."""
    query, key, value = operands
    scores = prod(query.shape[:-1]) * key.shape[-2]
    every = scores * products * (query.shape[-1] + value.shape[-1]) // 2
    return every // 2 if causal else every


def _of_attention_forward(node: Node) -> int:
    return _of_attention(node.inputs[:3], node.attr("causal"), 2)


def _of_attention_gradient(node: Node) -> int:
    return _of_attention(node.inputs[1:4], node.attr("causal"), 5)


def _of_recurrence(node: Node) -> int:
    return node.inputs[0].shape[0] * prod(node.inputs[1].shape)


def _of_recurrence_gradient(node: Node) -> int:
    return node.inputs[0].shape[0] * prod(node.inputs[2].shape)


_MULTIPLY_ADDS: dict[ops.Op, Callable[[Node], int]] = {
    ops.MATMUL: _of_matmul,
    ops.CONVOLUTION: _of_convolution,
    ops.CONVOLUTION_INPUT_GRADIENT: _of_input_gradient,
    ops.CONVOLUTION_WEIGHT_GRADIENT: _of_weight_gradient,
    ops.ATTENTION: _of_attention_forward,
    ops.ATTENTION_GRADIENT: _of_attention_gradient,
    ops.RECURRENCE: _of_recurrence,
    ops.RECURRENCE_GRADIENT: _of_recurrence_gradient,
}
