"""Count the structure of ltc/, and compare each number with its bound.

    python scripts/code/structure.py            the numbers; exit status 1 where one is beyond its bound
    python scripts/code/structure.py --list     and the places behind each

Each measure is a function of the parsed modules that gives the places it counts.
tests/unit/test_structure.py holds the bounds, and tests/unit/test_layers.py reads imports as here.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ltc"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LAZY = {"LazyModule", "lazy_names"}  # of ltc/support/lazy_module.py
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


def code_lines(module: Module) -> int:
    """Return the number of lines that are neither blank, nor a comment, nor a docstring's."""
    texts = (
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    docs = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
    lines = enumerate(map(str.strip, module.path.read_text().splitlines()), 1)
    return sum(line != "" and line[0] != "#" and number not in docs for number, line in lines)


# --- imports ----------------------------------------------------------------------------------


class Import(NamedTuple):
    """One module of ltc that a file imports.

    Attributes:
        is_lazy: It is imported at its first use: named in a call of LazyModule or lazy_names.
        is_typed: Only type checkers see it.
    """

    target: str
    line: int
    is_lazy: bool = False
    is_typed: bool = False


def imports(module: Module, names: Collection[str]) -> list[Import]:
    """Return the modules among `names` that one module imports."""
    typed = {id(inner) for node in _typed_blocks(module.tree) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            inner = [f"{source}.{alias.name}" for alias in node.names]
            targets = [one if one in names else source for one in inner]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").lstrip("_") in LAZY:
            targets = _texts(node)
        else:
            continue
        lazy, only_typed = isinstance(node, ast.Call), id(node) in typed
        found += [Import(one, node.lineno, lazy, only_typed) for one in targets if one in names]
    return found


def _typed_blocks(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            yield from node.body


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    folder = module.path.relative_to(ROOT).parent.parts
    base = folder[: len(folder) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _texts(node: ast.AST) -> list[str]:
    constants = (one for one in ast.walk(node) if isinstance(one, ast.Constant))
    return [one.value for one in constants if isinstance(one.value, str)]


def import_graph(all: list[Module]) -> dict[str, set[str]]:
    """Return for each module the others whose import its own import waits for."""
    names = {module.name for module in all}
    return {
        module.name: {
            one.target
            for one in imports(module, names)
            if not one.is_lazy and not one.is_typed and one.target != module.name
        }
        for module in all
    }


def import_cycles(all: list[Module]) -> Iterator[str]:
    try:
        list(TopologicalSorter(import_graph(all)).static_order())
    except CycleError as error:
        yield " -> ".join(error.args[1])


def longest_chain(all: list[Module]) -> Iterator[str]:
    """Yield the longest chain of modules of which each imports the next, before its own first line."""
    graph = import_graph(all)
    length: dict[str, int] = {}
    following: dict[str, str | None] = {}
    for name in TopologicalSorter(graph).static_order():
        following[name] = max(sorted(graph[name]), key=length.__getitem__, default=None)
        length[name] = 1 + length.get(following[name] or "", 0)
    name = max(sorted(length), key=length.__getitem__)
    while name is not None:
        yield name
        name = following[name]


def imported_once(all: list[Module]) -> Iterator[str]:
    """Yield the modules that one other module alone imports: a reader of either reads both."""
    names = {module.name for module in all}
    importers = defaultdict(set)
    for module in all:
        for one in imports(module, names):
            importers[one.target].add(module.name)
    for module in all:
        if module.path.name != "__init__.py" and len(importers[module.name]) == 1:
            (importer,) = importers[module.name]
            yield f"{module.at(1)}: {module.lines} lines, imported by {importer}"


# --- the rest ---------------------------------------------------------------------------------


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


def long_files(all: list[Module], most: int = 600) -> Iterator[str]:
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


def core_lines(all: list[Module]) -> Iterator[str]:
    """Lines of the native core's sources that are neither blank nor a comment."""
    for place, line in _lines_of_core():
        if line.strip() and not line.strip().startswith("//"):
            yield place


def long_core_lines(all: list[Module], most: int = 120) -> Iterator[str]:
    return (place for place, line in _lines_of_core() if len(line) > most)


def _lines_of_core() -> Iterator[tuple[str, str]]:
    for path in sorted((PACKAGE / "native" / "csrc").glob("*")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


class Measure(NamedTuple):
    """A number with a bound.

    Attributes:
        places: Gives the places that are counted.
        bound: The most of them that there may be.
        shared: The bound is in per cent of all modules but packages.
    """

    name: str
    places: Callable[[list[Module]], Iterator[str]]
    bound: int
    shared: bool = False

    def value(self, all: list[Module]) -> float:
        count = sum(1 for _ in self.places(all))
        if not self.shared:
            return count
        return 100 * count / sum(module.path.name != "__init__.py" for module in all)


MEASURES = (
    Measure("import cycles", import_cycles, 0),
    Measure("modules in the longest chain of imports", longest_chain, 40),
    Measure("% of modules that one module imports", imported_once, 26, shared=True),
    Measure("class names that two modules have", duplicate_classes, 0),
    Measure("functions of more than 60 lines", long_functions, 0),
    Measure("files of more than 600 lines", long_files, 1),
    Measure("closures more than two deep", deep_closures, 0),
    Measure("index arithmetic written as calls", index_calls, 0),
    Measure("parameters of device/ without annotation", bare_parameters, 0),
    Measure("lines of code of the native core", core_lines, 3000),
    Measure("lines of the native core of more than 120 characters", long_core_lines, 0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name every place that is counted")
    arguments = parser.parse_args()
    all = modules()
    lines, code = sum(module.lines for module in all), sum(map(code_lines, all))
    print(f"{len(all)} modules, {lines} lines, of which {code} are code")
    beyond = False
    for measure in MEASURES:
        value = measure.value(all)
        beyond |= value > measure.bound
        mark = "  <- beyond" if value > measure.bound else ""
        print(f"{value:5.0f} {measure.name} (at most {measure.bound}){mark}")
        if arguments.list:
            for place in measure.places(all):
                print(f"        {place}")
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main())
