"""What the house looks like in numbers, and what of it is beyond its bounds.

    python scripts/code/structure.py            the numbers; exit status 1 where one is beyond its bound
    python scripts/code/structure.py --list     and what stands behind each

Each measure is a function of the parsed modules that gives the places it counts.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ltc"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
INDEX_CALLS = {"plus", "minus", "times", "divided", "least", "most"}


class Module(NamedTuple):
    path: Path
    lines: int
    tree: ast.Module

    @property
    def name(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def modules() -> list[Module]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        found.append(Module(path, text.count("\n"), ast.parse(text)))
    return found


def crowded_folders(all: list[Module], most: int = 16) -> Iterator[str]:
    """Folders of more modules than a reader takes in at a glance."""
    folders = Counter(m.path.parent for m in all if m.path.name != "__init__.py")
    for folder, count in folders.items():
        if count > most:
            yield f"{folder.relative_to(ROOT)}: {count} modules"


def import_cycles(all: list[Module]) -> Iterator[str]:
    names = {module.name for module in all}
    graph = {module.name: set(_imports(module, names)) - {module.name} for module in all}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        yield " -> ".join(error.args[1])


def _imports(module: Module, names: set[str]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in names or node.module in names:
                    yield inner if inner in names else node.module


def duplicate_classes(all: list[Module]) -> Iterator[str]:
    """Names that two classes of different modules have."""
    places = defaultdict(list)
    for module in all:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.at(node.lineno))
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"{name}: {', '.join(where)}"


def long_functions(all: list[Module], most: int = 60) -> Iterator[str]:
    for module in all:
        for node in ast.walk(module.tree):
            if isinstance(node, FUNCTIONS) and node.end_lineno - node.lineno + 1 > most:
                yield f"{module.at(node.lineno)} {node.name}: {node.end_lineno - node.lineno + 1}"


def long_files(all: list[Module], most: int = 400) -> Iterator[str]:
    for module in all:
        if module.lines > most:
            yield f"{module.at(1)}: {module.lines} lines"


def deep_closures(all: list[Module], most: int = 2) -> Iterator[str]:
    """Functions inside functions inside functions: control flow that reads inside out."""
    for module in all:
        for node, depth in _functions(module.tree, 0):
            if depth > most:
                yield f"{module.at(node.lineno)} {node.name}: {depth} deep"


def _functions(tree: ast.AST, depth: int) -> Iterator[tuple[ast.FunctionDef, int]]:
    """Every function with how many others it stands in; a class begins anew."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, FUNCTIONS):
            yield child, depth
            yield from _functions(child, depth + 1)
        else:
            yield from _functions(child, 0 if isinstance(child, ast.ClassDef) else depth)


def bare_parameters(all: list[Module], package: str = "ltc.device") -> Iterator[str]:
    """Parameters that say no type: `self` and `cls` need none."""
    for module in all:
        if not f"{module.name}.".startswith(f"{package}."):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, FUNCTIONS):
                for parameter in _parameters(node.args):
                    if parameter.annotation is None and parameter.arg not in ("self", "cls"):
                        yield f"{module.at(node.lineno)} {node.name}: {parameter.arg}"


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    rest = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]


def index_calls(all: list[Module]) -> Iterator[str]:
    """Index arithmetic of the generator that is written as calls."""
    for module in all:
        if not module.name.startswith("ltc.llvm."):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in INDEX_CALLS:
                    yield module.at(node.lineno)


class Measure(NamedTuple):
    """`places` gives what is counted; more than `bound` of them is too many."""

    name: str
    places: Callable[[list[Module]], Iterator[str]]
    bound: int


MEASURES = (
    Measure("folders of more than 16 modules", crowded_folders, 0),
    Measure("import cycles", import_cycles, 0),
    Measure("class names that two modules have", duplicate_classes, 0),
    Measure("functions of more than 60 lines", long_functions, 0),
    Measure("files of more than 400 lines", long_files, 8),
    Measure("closures more than two deep", deep_closures, 0),
    Measure("index arithmetic written as calls", index_calls, 0),
    Measure("parameters of device/ without annotation", bare_parameters, 0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name every place that is counted")
    arguments = parser.parse_args()
    all = modules()
    print(f"{len(all)} modules, {sum(module.lines for module in all)} lines")
    beyond = False
    for measure in MEASURES:
        found = list(measure.places(all))
        beyond |= len(found) > measure.bound
        mark = "  <- beyond" if len(found) > measure.bound else ""
        print(f"{len(found):5} {measure.name} (at most {measure.bound}){mark}")
        if arguments.list:
            for place in found:
                print(f"        {place}")
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main())
