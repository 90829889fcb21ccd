"""Imports go one way, down the layers, and stand at the top of their file."""

import ast
import functools
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ltc"

# Files and folders of ltc/, from the leaves up. A module imports from its own layer the entries before
# its own, and its own entry; in a layer of siblings, its own entry alone.
LAYERS = [
    ["errors", "config", "tracebacks", "support", "explaining", "native"],
    ["ir"],
    ["aten", "passes", "llvm"],
    ["backends"],
    ["runtime"],
    ["device"],
    ["profiling", "training_loop", "distributed", "checkpointing", "amp", "replay"],
    ["utils", "core", "debug", "integrations", "", "command_line", "__main__", "compat"],
]
SIBLINGS = 2  # the layer of which no entry imports another

# Folders inside a layer, from the leaves up: a module imports its own folder and those before it.
FOLDERS = (
    ("aten.rules", "aten.nn"),
    (
        "llvm.compiler",
        "llvm.emit",
        "llvm.native",
        "llvm.loop_schedule",
        "llvm.loops",
        "llvm.gemm",
        "llvm.conv",
        "llvm.pooling",
        "llvm.attention",
        "llvm.recurrence",
        "llvm.ops",
    ),
    ("backends.reference", "backends.interpreter", "backends.llvm", "backends.xla"),
    (
        "device.shapes",
        "device.evidence",
        "device.symbolic",
        "device.immediate",
        "device.recording",
        "device.ops",
        "device.dynamo",
        "device.hooks",
    ),
    ("distributed.transport", "distributed.c10d", "distributed.launch"),
)
# Imports inside a function, each with the reason why it can not stand at the top.
INSIDE_A_FUNCTION = {
    (
        "llvm.compiler.llvm_binding",
        "llvmlite.binding",
    ): "a process that compiles nothing does without; 40 ms",
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


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the name of each module of ltc that the file imports, now or at its first use."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = absolute(path, node)
            inner = [f"{source}.{alias.name}" for alias in node.names]
            names = [one if below(one) in MODULES else source for one in inner]
        elif isinstance(node, ast.Call):
            names = lazily_named(node)
        else:
            continue
        yield from ((node.lineno, below(one)) for one in names if one.split(".")[0] == "ltc")


def lazily_named(call: ast.Call) -> list[str]:
    """The modules named in LazyModule("ltc.…") and lazy_names(globals(), {"name": "ltc.…"})."""
    if getattr(call.func, "id", "").lstrip("_") not in ("LazyModule", "lazy_names"):
        return []
    constants = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)]
    return [one for one in constants if isinstance(one, str) and one.startswith("ltc.")]


def below(name: str) -> str:
    """ "aten.registry" for "ltc.aten.registry", "" for "ltc"."""
    return name.removeprefix("ltc").removeprefix(".")


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
        return target_layer < layer or (target_position == position and target_layer == layer)
    return target_position <= position


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    wrong = [
        f"ltc.{module}, line {line}, imports ltc.{target}"
        for line, target in imports_of(MODULES[module])
        if not may_import(module, target)
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_imported_at_its_first_use_is_an_import():
    xla = imports_of(PACKAGE / "backends" / "xla" / "start.py")
    assert "backends.xla.xla_backend" in {target for _, target in xla}
    public = imports_of(PACKAGE / "__init__.py")
    assert "distributed.lazy_multiprocessing" in {target for _, target in public}


def folder_of(module: str) -> str:
    return module.rpartition(".")[0]


@pytest.mark.parametrize("order", FOLDERS, ids=lambda order: order[0].partition(".")[0])
def test_folders_of_a_layer_import_one_way(order):
    place = {folder: k for k, folder in enumerate(order)}
    wrong = [
        f"ltc.{module} imports ltc.{target}"
        for module, path in MODULES.items()
        if folder_of(module) in place
        for _, target in imports_of(path)
        if place.get(folder_of(target), -1) > place[folder_of(module)]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", [m for m, p in MODULES.items() if p.name == "__init__.py"])
def test_every_folder_says_what_lives_there(package):
    if package != "compat":
        assert ast.get_docstring(ast.parse(MODULES[package].read_text()))


def test_no_module_imports_itself_through_others():
    graph = {m: {t for _, t in imports_of(path) if t != m} for m, path in MODULES.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, naming the cycle


def test_only_compat_imports_the_whole_package():
    wrong = [m for m, path in MODULES.items() if "" in {target for _, target in imports_of(path)}]
    assert all(m.startswith("compat") for m in wrong), wrong


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes_of(path):
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
        place_of(module)


def test_the_wheel_has_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    here = {"ltc" + (f".{m}" if m else "") for m, p in MODULES.items() if p.name == "__init__.py"}
    # installed beside ltc, under its own name
    here = {name.replace("ltc.compat.lazy_tensor_core", "lazy_tensor_core") for name in here}
    assert set(settings["packages"]) == here


def test_the_table_of_layers_names_every_folder():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    packages = {path.parent.name for path in FILES if path.name == "__init__.py"}
    packages -= {"ltc", "lazy_tensor_core"}
    assert {name for name in packages if f"`{name}/`" not in table} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("distributed")])
def test_replicas_ask_the_backend_what_it_can_add(module):
    """What a sum's operands look like in shared memory stands in ltc/ir, for both sides."""
    native = ("llvm", "backends.llvm")
    targets = {target for _, target in imports_of(MODULES[module])}
    assert not [t for t in targets for name in native if t == name or t.startswith(f"{name}.")]
