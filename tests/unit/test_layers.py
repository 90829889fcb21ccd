"""Imports go one way, down the layers, and stand at the top of their file."""

import ast
import functools
import tomllib
from collections import Counter
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
        "support.process.fork_safe_lock",
        "support.process.thread_frames",
        "debug.amounts",
        "debug.metrics",
        "debug.often",
        "debug.metrics_saver",
        "debug.profiler",
        "support",
        "explaining",
        "profiling.spans",
        "profiling.step_times",
        "profiling.trace_file",
        "utils.keyd_queue",
        "utils.rate_tracker",
        "checkpointing.tree_codec",
        "checkpointing.safetensors_format",
        "checkpointing.checked_archive",
    ],
    ["ir"],
    ["aten", "passes", "llvm"],
    ["backends"],
    ["runtime"],
    ["device"],
    [
        "profiling.machine_facts",
        "profiling.analysis",
        "profiling.page",
        "profiling.report",
        "profiling.holders",
        "profiling.trace",
        "profiling.profile",
        "profiling.last_lines",
        "utils.closures",
        "utils.cached_dataset",
        "utils.checkpoint_tagger",
        "utils.container_forms",
        "utils.loader_options",
        "utils.nested_copy",
        "utils.batch_source",
        "utils.transfer",
        "checkpointing.saving",
        "utils.steps",
        "distributed.world",
        "checkpointing.xser_legacy",
        "checkpointing.manifest",
        "checkpointing.reader",
        "checkpointing.storage_sharing",
        "utils.serialization",
        "checkpointing.snapshot",
        "checkpointing.elastic_sampler",
        "checkpointing.resumable",
        "utils.checkpoint",
        "amp",
        "replay",
        "distributed",
    ],
    [
        "core.devices",
        "core.replicas",
        "core.training",
        "core.exchanges",
        "core.lazy_model",
        "core.functions",
        "debug.graphs",
        "debug.whereabouts",
        "utils.utils",
        "integrations",
        "",
        "debug.environment",
        "debug.script_check",
        "command_line",
        "__main__",
        "compat",
    ],
]
SIBLINGS = 2  # the layer of which no entry imports another
PACKAGES_WITHOUT_CODE = {"checkpointing", "core", "debug", "profiling", "support", "utils"}

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
    ("backends.reference", "backends.interpreter", "backends.llvm"),
    (
        "device.shapes",
        "device.op_by_op",
        "device.evidence",
        "device.recording",
        "device.ops",
        "device.dynamo",
        "device.hooks",
    ),
    ("distributed.transport", "distributed.c10d", "distributed.launch"),
)
MOST_MODULES = 16  # of a folder: what a reader still takes in at a glance

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


def imports_of(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """Every module of ltc that the file imports, below "ltc."; "" for the package itself."""
    for statement in nodes_of(path):
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
        return target_layer < layer or (target_position == position and target_layer == layer)
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


def test_no_folder_is_crowded():
    folders = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert not [str(folder) for folder, count in folders.items() if count > MOST_MODULES]


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
        if module not in PACKAGES_WITHOUT_CODE:
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
    packages -= {"ltc", "lazy_tensor_core", "debug"}  # of debug it names the files: they lie apart
    assert {name for name in packages if f"`{name}/`" not in table} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("distributed")])
def test_replicas_ask_the_backend_what_it_can_add(module):
    """What a sum's operands look like in shared memory stands in ltc/ir, for both sides."""
    native = ("llvm", "backends.llvm")
    targets = {target for _, target in imports_of(MODULES[module])}
    assert not [t for t in targets for name in native if t == name or t.startswith(f"{name}.")]
