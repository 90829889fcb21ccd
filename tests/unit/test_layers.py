"""Imports go one way, down the layers, and stand at the top of their file."""

import ast
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ltc"

# From the leaves up. A module imports from its own layer what is listed before it, and its own
# entry; in a layer of siblings, its own entry alone. An entry means all modules below it.
LAYERS = [
    [
        "errors",
        "config",
        "tracebacks",
        "utils.renewed_lock",
        "utils.thread_frames",
        "debug.metrics",
        "debug.metrics_saver",
        "debug.profiler",
        "utils.channel",
        "utils.atomic",
        "utils.keyd_queue",
        "utils.tree",
        "utils.nested",
        "utils.safetensors_format",
        "utils.disk_cache",
        "utils.version",
        "utils.rate_tracker",
    ],
    ["ir"],
    ["aten", "passes", "llvm"],
    ["backends"],
    ["runtime"],
    ["device"],
    [
        "utils.closures",
        "utils.cached_dataset",
        "utils.checkpoint_tagger",
        "utils.transfer",
        "utils.saving",
        "utils.steps",
        "distributed.world",
        "utils.old_serialization",
        "utils.manifest",
        "utils.saved_file",
        "utils.shared_tensors",
        "utils.serialization",
        "utils.snapshot",
        "utils.resumable",
        "utils.checkpoint",
        "amp",
        "distributed",
    ],
    ["core.lazy_model", "core.functions", "debug.graphs", "utils.utils", "", "compat"],
]
SIBLINGS = 2  # the layer of which no entry imports another
PACKAGES_WITHOUT_CODE = {"core", "debug", "utils"}

# Imports inside a function, each with the reason why it can not stand at the top.
INSIDE_A_FUNCTION = {
    ("llvm.jit", "llvmlite.binding"): "a process that compiles nothing does without; 40 ms",
}

FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """aten.registry for ltc/aten/registry.py; "" for ltc/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def place_of(module: str) -> tuple[int, int]:
    """The module's layer, and its entry in the layer."""
    for layer, entries in enumerate(LAYERS):
        for position, entry in enumerate(entries):
            if module == entry or (entry and module.startswith(f"{entry}.")):
                return layer, position
    raise LookupError(f"ltc.{module} stands in no layer: add it to the table in {__file__}")


def imports_of(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """Every module of ltc that the file imports, below "ltc."; "" for the package itself."""
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.name.split(".")[0] == "ltc":
                    yield statement, alias.name.removeprefix("ltc").removeprefix(".")
        elif isinstance(statement, ast.ImportFrom):
            source = absolute(path, statement)
            if source.split(".")[0] == "ltc":
                below = source.removeprefix("ltc").removeprefix(".")
                for alias in statement.names:
                    inner = f"{below}.{alias.name}".removeprefix(".")
                    yield statement, inner if inner in MODULES else below


def absolute(path: Path, statement: ast.ImportFrom) -> str:
    if not statement.level:
        return statement.module or ""
    folder = path.relative_to(ROOT).parent.parts
    base = folder[: len(folder) - statement.level + 1]
    return ".".join([*base, *([statement.module] if statement.module else [])])


def may_import(module: str, target: str) -> bool:
    layer, position = place_of(module)
    target_layer, target_position = place_of(target)
    if target_layer != layer or layer == SIBLINGS:
        return target_layer < layer or target_position == position and target_layer == layer
    return target_position <= position


@pytest.mark.parametrize("module", [m for m in MODULES if m not in PACKAGES_WITHOUT_CODE])
def test_imports_go_down(module):
    wrong = [
        f"ltc.{module}, line {statement.lineno}, imports ltc.{target}"
        for statement, target in imports_of(MODULES[module])
        if target not in PACKAGES_WITHOUT_CODE and not may_import(module, target)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(PACKAGES_WITHOUT_CODE))
def test_a_package_that_spans_layers_imports_nothing(package):
    assert not list(imports_of(MODULES[package]))


def test_no_module_imports_itself_through_others():
    graph = {m: {t for _, t in imports_of(path) if t != m} for m, path in MODULES.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, naming the cycle


def test_only_compat_imports_the_whole_package():
    wrong = [m for m, path in MODULES.items() if "" in {target for _, target in imports_of(path)}]
    assert all(m.startswith("compat") for m in wrong), wrong


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def test_imports_stand_at_the_top():
    found = set()
    for module, path in MODULES.items():
        for function in functions_of(path):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    found.update((module, alias.name) for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    found.add((module, absolute(path, node)))
    assert found == set(INSIDE_A_FUNCTION)


def test_every_module_stands_in_a_layer():
    for module in MODULES:
        if module not in PACKAGES_WITHOUT_CODE:
            place_of(module)


def test_the_wheel_has_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    here = {"ltc" + (f".{m}" if m else "") for m, p in MODULES.items() if p.name == "__init__.py"}
    here = {name for name in here if not name.startswith("ltc.compat")}
    assert set(settings["packages"]) == here | {"lazy_tensor_core"}
