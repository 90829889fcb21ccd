"""Recorded calls become a graph: each by its rule, or as an extern node that calls torch's kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ltc import config
from ltc.aten.call import Call, CallResult, Numbering, Scalar
from ltc.aten.extern import extern
from ltc.aten.registry import Rule, rule_of
from ltc.aten.schema import schema_of
from ltc.aten.unnamed_dtype import lowering
from ltc.errors import InvalidGraph, Unsupported
from ltc.explaining import faults
from ltc.ir import build, ops
from ltc.ir.graph import Graph, Origin
from ltc.ir.node import Node, is_number, make
from ltc.ir.tensor_type import TensorType
from ltc.support.observation import metrics


def expand(
    calls: Sequence[Call], outputs: Sequence[CallResult], numbering: Numbering | None = None
) -> Graph:
    """Return the graph of the calls' formulas.

    With LTC_CHECK, a rule that gives another shape than the recorded one raises InvalidGraph, which
    names the overload.

    Args:
        calls: In recorded order, each before those that read it.
        outputs: The values that the program returns.
        numbering: The numbers of the program's inputs and scalars; None: in the order of first use.
    """
    trace = _Trace(numbering or Numbering(calls))
    for call in calls:
        trace.add(call)
    return trace.graph(outputs)


def expand_alone(call: Call) -> tuple[Graph, list[CallResult], list[int]]:
    """The graph of one call: its defined results from its operands.

    With it, in the graph's order: the values that are its inputs, and the slots in the recording
    that its scalars are.
    """
    numbering = Numbering([call])
    trace = _Trace(numbering)
    operands = values_read_by(call)
    for index, value in enumerate(operands):
        trace.nodes[value] = trace.inputs[index] = make(
            ops.INPUT, index=index, dtype=value.dtype, shape=tuple(value.shape)
        )
    trace.add(call)
    graph = trace.graph([value for value in call.results if value is not None])
    return graph, operands, list(numbering.slots)


def values_read_by(call: Call) -> list[CallResult]:
    """Each once, in the order in which a graph of the call has them."""
    return list(dict.fromkeys(_values_in((*call.args, *call.kwargs.values()))))


def _values_in(operands: Iterable[Any]) -> Iterable[CallResult]:
    for operand in operands:
        if isinstance(operand, CallResult):
            yield operand
        elif isinstance(operand, (list, tuple)):
            yield from _values_in(operand)


class _Trace:
    """The nodes of the calls' values and scalars so far."""

    def __init__(self, numbering: Numbering) -> None:
        self.numbering = numbering
        self.nodes: dict[CallResult, Node] = {}
        self.inputs: dict[int, Node] = {}
        self.scalars: dict[int, Node] = {}
        self.origins: dict[Node, Origin] = {}
        self.position = -1  # of the call that is expanded

    def add(self, call: Call) -> None:
        self.position += 1
        try:
            with lowering(call):
                made = self._expand(call)
            for value, node in zip(call.results, made, strict=True):
                if value is not None and node is not None:
                    self.nodes[value] = node
        except Exception as error:
            error.add_note(f"while tracing {call.name} called at {call.line}")
            raise
        self._mark(made, self._origin(call))

    def _origin(self, call: Call) -> Origin:
        return Origin(call.name, call.line, self.position, call.module, call.forward)

    def graph(self, outputs: Sequence[CallResult]) -> Graph:
        return Graph(
            inputs=tuple(self.inputs[i] for i in sorted(self.inputs)),
            scalars=tuple(self.scalars[i] for i in sorted(self.scalars)),
            outputs=tuple(self.nodes[value] for value in outputs),
            origins=self.origins,
        )

    def _mark(self, made: Sequence[Node | None], origin: Origin) -> None:
        """Every node that is new with this call comes from it."""
        waiting = [node for node in made if node is not None]
        while waiting:
            node = waiting.pop()
            if node not in self.origins:
                self.origins[node] = origin
                waiting.extend(node.inputs)

    def _expand(self, call: Call) -> tuple[Node | None, ...]:
        if call.name == "ltc::input":
            return (self._input(call),)
        types = tuple(
            None if v is None else TensorType(v.dtype, tuple(v.shape)) for v in call.results
        )
        args, kwargs = call.filled(self._operand)
        seed = None if call.seed is None else self._operand(call.seed)
        rule = rule_of(call.name)
        if rule is not None and (rule.moves or not _has_complex(args, types)):
            made = _by_rule(rule, call, args, kwargs, types, seed)
            if made is not None:
                return made
        return extern(call.name, args, kwargs, types, tuple(call.mutated), call.returned, seed)

    def _input(self, call: Call) -> Node:
        (value,), index = call.results, self.numbering.inputs[call.args[0]]
        assert value is not None
        node = make(ops.INPUT, index=index, dtype=value.dtype, shape=tuple(value.shape))
        self.inputs[index] = node
        self.origins.setdefault(node, self._origin(call))
        return node

    def _operand(self, argument: Any) -> Any:
        if isinstance(argument, CallResult):
            return self.nodes[argument]
        if isinstance(argument, Scalar):
            slot = self.numbering.slots[argument.slot]
            node = make(ops.SCALAR, slot=slot, dtype=argument.dtype, wrapped=bool(argument.wrapped))
            self.scalars[slot] = node
            return node
        return argument


# What a formula raises of operands that it takes to be of other shapes.
OF_SHAPES = (InvalidGraph, IndexError, ValueError, TypeError, AssertionError, ZeroDivisionError)
# What any formula raises that is wrong.
_OF_FAULTS = (*OF_SHAPES, LookupError, AttributeError, NameError, ArithmeticError)


def _by_rule(
    rule: Rule,
    call: Call,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    types: Sequence[TensorType | None],
    seed: Node | None,
) -> tuple[Node | None, ...] | None:
    """Return the rule's results, of the recorded types; None if torch's kernel is to run.

    Torch's kernel runs, too, where the rule fails or gives other shapes than were recorded. That is
    a fault of ltc's, which LTC_CHECK raises, a counter counts and an explanation names.
    """
    try:
        made = apply(rule, call.name, args, kwargs, types, seed)
        if made is None:
            return None
        return tuple(_settled(n, t, call.name) for n, t in zip(made, types, strict=True))
    except _OF_FAULTS as error:
        if config.value("LTC_CHECK") or call.name.startswith("ltc::"):
            raise
        metrics.count(f"RuleFault::{call.name}")
        where = f"called at {call.line}, with results {_listed(types)}"
        faults.note(error, f"the rule of {call.name}, {where},")
        return None


def _listed(types: Sequence[TensorType | None]) -> str:
    return ", ".join(str(type) for type in types)


def apply(
    rule: Rule,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    types: Sequence[TensorType | None],
    seed: Node | None,
) -> tuple[Node | None, ...] | None:
    """Return the rule's results, flat; None if it leaves the call to torch's kernel."""
    kwargs = _functional_kwargs(name, kwargs)
    if rule.alike and not rule.fits(args, kwargs):
        return None
    if rule.takes_results:
        kwargs["results"] = types
    if rule.takes_seed:
        kwargs["seed"] = seed
    try:
        made = rule.function(*args, **kwargs)
    except Unsupported:
        return None
    if made is None or made is NotImplemented:
        return None
    return tuple(_flat(made))


def _functional_kwargs(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without what says where a result goes rather than what it is."""
    schema = schema_of(name)
    outs = {a.name for a in schema.arguments if a.is_out} if schema is not None else set()
    return {k: v for k, v in kwargs.items() if k not in outs and k not in PLACEMENT}


PLACEMENT = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"}
)


def _flat(made: Any) -> Iterable[Node | None]:
    if isinstance(made, (list, tuple)):
        for item in made:
            yield from _flat(item)
    else:
        yield made


def _has_complex(argument: Any, types: Sequence[TensorType | None]) -> bool:
    """Return True if a formula over real numbers would be wrong here."""
    if any(t is not None and not is_real(t.dtype) for t in types):
        return True
    waiting = [argument]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif (isinstance(item, Node) and not is_real(item.dtype)) or isinstance(item, complex):
            return True
    return False


REAL = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


def is_real(dtype: torch.dtype) -> bool:
    """Return True if the formulas of this package hold for the dtype."""
    return dtype in REAL


def _settled(node: Node | None, type: TensorType | None, name: str) -> Node | None:
    """The rule's result rounded to the recorded dtype."""
    if type is None or node is None:
        if type is not None:
            raise InvalidGraph(f"{name}: its rule gives nothing where {type} was recorded")
        return None
    if node.shape != type.shape:
        raise InvalidGraph(f"{name}: its rule gives {node.type} where {type} was recorded")
    return build.cast(_as_tensor(node), type.dtype)


def _as_tensor(node: Node) -> Node:
    """A filled 0-dim tensor is the number it was filled with, yet promotes as a tensor does."""
    return make(ops.RESHAPE, node, shape=()) if is_number(node) else node
