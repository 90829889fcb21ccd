"""A traced graph whose code stands at the lines that it was traced from.

Dynamo writes a graph's code anew, into a file of no name. With the user's file and lines instead,
explanations, errors and tracebacks name the line that asked for a call, as without torch.compile.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import fx

from ltc.tracebacks import is_users

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


class Line(NamedTuple):
    """Where the user's program asked for something."""

    file: str
    number: int
    function: str


def at_the_users_lines(graph: fx.GraphModule) -> Callable[..., Any]:
    """Its forward, compiled as if it stood in the file of the function that was traced."""
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
