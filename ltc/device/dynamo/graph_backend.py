"""The backend "ltc" of torch.compile: a graph that Dynamo has traced is recorded, call by call.

So a compiled function is part of its step like everything around it: one program for the step, by
ltc's own passes, and autograd, autocast and random numbers are as without Dynamo.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ltc.device.recording.tensors import is_lazy
from ltc.support.torch_private import (
    dispatch_mode_depth,
    function_mode_depth,
    is_forward_mode,
    is_transformed,
)
from ltc.tracebacks import is_users


def ltc(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return the function that Dynamo calls in place of the code it has traced.

    Args:
        inputs: Stand-ins for the arguments of its calls.
        mode, options: Inductor's; there is nothing to choose, and every value is taken.

    Example:
        >>> @torch.compile(backend="ltc")
        ... def norm(x):
        ...     return x.square().sum().sqrt()
        >>> norm(torch.full((4,), 2.0, device="ltc")).item()
        4.0
    """
    run_as_code(graph)
    return at_the_users_lines(graph)


def is_on_ltc(graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return True if any tensor that the graph takes, holds or makes is on an ltc device."""
    return any(is_lazy(tensor) for tensor in _tensors_of(graph, inputs))


def _tensors_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[Any]:
    yield from inputs
    yield from graph.parameters()
    yield from graph.buffers()
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                made = node.meta.get("example_value")
                yield from made if isinstance(made, (tuple, list)) else (made,)


# --- graphs inside a traced graph run as code -------------------------------------------------
# Dynamo keeps the forward and the backward of a torch.autograd.Function, and checkpointed calls, as
# graphs of their own, and torch hands these to fx's interpreter: each step then pays for every node.
# So the interpreter is given a graph of one node, which calls the other's code; a function's are
# called without it.

INTERPRETED = frozenset({"autograd_function_apply", "tag_activation_checkpoint"})


def run_as_code(graph: fx.GraphModule) -> None:
    """Put a graph of one call in the place of each that would be interpreted, at any depth."""
    for name in dict.fromkeys(_interpreted(graph)):
        nested = getattr(graph, name)
        run_as_code(nested)
        setattr(graph, name, _called(nested))
    function = torch.ops.higher_order.autograd_function_apply
    functions = graph.graph.find_nodes(op="call_function", target=function)
    found = [node for node in functions if can_apply(node.kwargs)]
    for node in found:
        node.target = applied
    if found:
        graph.recompile()


def _interpreted(graph: fx.GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and str(node.target) in INTERPRETED:
            for operand in node.args:
                if isinstance(operand, fx.Node) and operand.op == "get_attr":
                    assert isinstance(operand.target, str)
                    if isinstance(getattr(graph, operand.target), fx.GraphModule):
                        yield operand.target


class _Code(nn.Module):
    """A graph's computation, run by its code."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.run: Callable[..., Any] = at_the_users_lines(graph)

    def forward(self, *operands: Any) -> Any:
        return self.run(*operands)


def _called(nested: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    given = [node for node in nested.graph.nodes if node.op == "placeholder"]
    operands = tuple([graph.placeholder(node.name) for node in given])
    graph.output(graph.call_module("body", operands))
    return fx.GraphModule({"body": _Code(nested)}, graph)


# A traced torch.autograd.Function is applied by one class, where torch makes one for each call.
# To make a class, and to interpret its graphs, takes torch longer than ltc to record them.

_TOLD = frozenset({"dirty_idx", "non_differentiable_idx", "saved_for_backward_idx"})


def can_apply(told: dict[str, Any]) -> bool:
    """Return True if torch passes the facts about the function that `applied` needs: not torch
    2.10, say.
    """
    return "saved_for_backward_idx" in told and told.keys() <= _TOLD


def applied(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *operands: Any,
    non_differentiable_idx: Sequence[int],
    saved_for_backward_idx: Sequence[int],
    dirty_idx: Sequence[int] = (),
) -> Any:
    """Return the results of torch's autograd_function_apply, which handles transforms and modes.

    Args:
        forward: The graph from operands to (results, kept values), of one call of code.
        backward: The graph from gradients and kept values to the operands' gradients.
        non_differentiable_idx, dirty_idx: Positions among the results.
        saved_for_backward_idx: Positions among the kept values of those that the user's code gave to
        ctx.save_for_backward, so that writes to them are noticed, as without torch.compile.
    """
    if is_transformed() or is_forward_mode() or dispatch_mode_depth() or function_mode_depth():
        return torch.ops.higher_order.autograd_function_apply(
            forward,
            backward,
            *operands,
            non_differentiable_idx=non_differentiable_idx,
            saved_for_backward_idx=saved_for_backward_idx,
            dirty_idx=dirty_idx,
        )
    codes = forward.body.run, backward.body.run  # type: ignore[union-attr]  # see above
    places = frozenset(saved_for_backward_idx), non_differentiable_idx, dirty_idx
    return _Applied.apply(*codes, *places, *operands)


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        saved: frozenset[int],
        constants: Sequence[int],
        dirty: Sequence[int],
        *operands: Any,
    ) -> Any:
        results, kept = forward(*operands)
        ctx.backward_code = backward
        ctx.save_for_backward(*[x if place in saved else None for place, x in enumerate(kept)])
        ctx.others = [None if place in saved else x for place, x in enumerate(kept)]
        if dirty:
            ctx.mark_dirty(*_at(results, dirty))
        if constants:
            ctx.mark_non_differentiable(*_at(results, constants))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept = [x if y is None else y for x, y in zip(ctx.others, ctx.saved_tensors, strict=True)]
        found = ctx.backward_code(*gradients, *kept)
        return (
            None,
            None,
            None,
            None,
            None,
            *(found if isinstance(found, (tuple, list)) else (found,)),
        )


def _at(results: Any, places: Sequence[int]) -> list[Any]:
    whole = results if isinstance(results, (tuple, list)) else (results,)
    return [whole[place] for place in dict.fromkeys(places)]


# --- A traced graph whose code stands at the lines that it was traced from -----------------------

# Dynamo writes a graph's code anew, into a file of no name. With the user's file and lines
# instead, explanations, errors and tracebacks name the line that asked for a call, as without
# torch.compile.

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


class Line(NamedTuple):
    """A line of the user's program."""

    file: str
    number: int
    function: str


def at_the_users_lines(graph: fx.GraphModule) -> Callable[..., Any]:
    """Return the graph's forward, compiled as if it stood in the file of the traced function."""
    traced = {node.name: _users_frames(node.stack_trace or "") for node in graph.graph.nodes}
    outermost = next((frames[0] for frames in traced.values() if frames), None)
    if outermost is None:
        return graph.forward
    lines = {name: _innermost_in(outermost, frames) for name, frames in traced.items()}
    tree = ast.parse(graph.code)
    (function,) = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    function.name = outermost.function
    number = outermost.number
    for statement in function.body:
        number = lines.get(_assigned(statement), number)
        for part in ast.walk(statement):
            if isinstance(part, (ast.stmt, ast.expr)):
                part.lineno, part.end_lineno = number, number
                part.end_col_offset = None  # columns of the generated text say nothing
    known = dict(graph.forward.__func__.__globals__)  # type: ignore[attr-defined]  # it is a method
    exec(compile(tree, outermost.file, "exec"), known)
    made: FunctionType = known[outermost.function]
    return MethodType(made, graph)


def _users_frames(stack: str) -> list[Line]:
    """The outermost first."""
    found = [Line(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(stack)]
    return [line for line in found if is_users(line.file)]


def _innermost_in(outermost: Line, frames: list[Line]) -> int:
    """Code has one file: of a call in another file, the line that led there."""
    here = [line.number for line in frames if line.file == outermost.file]
    return here[-1] if here else outermost.number


def _assigned(statement: ast.stmt) -> str:
    """The name that the statement gives a value; "" where it gives none."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else ""
