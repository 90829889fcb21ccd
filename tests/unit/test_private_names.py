"""Private names of torch stand in one module, and one that is missing is told at import."""

import ast
import functools
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from ltc.support import torch_private

PACKAGE = Path(__file__).parents[2] / "ltc"
THE_MODULE = PACKAGE / "support" / "torch_private.py"
FILES = sorted(PACKAGE.rglob("*.py"))

# Names with an underscore in front that are neither torch's nor ltc's.
ELSEWHERE = {
    "_AcceleratorConnector": "where Lightning's Trainer chooses a strategy",
    "_Connector": "where Lightning's Fabric does",
    "_current_frames": "sys._current_frames is documented",
    "_data": "os.environ's own dict, which no lookup has to decode",
    "_exit": "os._exit is documented",
    "_extra_reducers": "ForkingPickler's, which cloudpickle does not know",
    "_fields": "namedtuples are documented",
    "_getframe": "sys._getframe is documented",
    "_globalstep_last_logged": "transformers' Trainer: the step of its last log",
    "_inheriting": "multiprocessing's sign that the main module is imported again",
    "_lru_cache_wrapper": "the class of what functools.cache gives",
    "_metadata": "state_dict() is documented to have it",
    "_parallel_devices": "what Lightning's connectors have found",
    "_process_group_backend": "what Lightning's DDPStrategy was given",
    "_reconstruct": "copy.copy for what __reduce_ex__ gives",
    "_replace": "namedtuples are documented",
    "_tr_loss": "transformers' Trainer: the losses since then",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def parts_of(node: ast.expr) -> list[str]:
    """["torch", "_C", "x"] for torch._C.x; what is not a name is left out."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else parts


def imported_from_torch(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or "torch" for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def defined_in(tree: ast.Module) -> set[str]:
    """Private names that the module gives to something of its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # of __slots__
            found |= {node.value} if node.value.isidentifier() else set()
    return found


def private_names(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) for every private name of torch that a module spells."""
    of_torch = imported_from_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from _modules(node.lineno, [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom):
            yield from _modules(node.lineno, [f"{node.module}.{a.name}" for a in node.names])
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            parts = parts_of(node)
            is_operator = "ops" in parts[:2] or "aten" in parts[0].strip("_")
            if parts[0] in of_torch and not is_operator:
                yield node.lineno, ".".join(parts)
            elif not is_operator and node.attr not in own and node.attr not in ELSEWHERE:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                if name.value not in own | set(ELSEWHERE):
                    yield node.lineno, ast.unparse(node)


def _modules(line: int, names: list[str]) -> Iterator[tuple[int, str]]:
    for name in names:
        root, *rest = name.split(".")
        if root == "torch" and any(map(is_private, rest)):
            yield line, name


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


@functools.cache
def own_names() -> set[str]:
    """Private names that ltc gives to something, all of its modules together."""
    return set().union(*(defined_in(tree) for path, tree in trees().items() if path != THE_MODULE))


@pytest.mark.parametrize("path", [p for p in FILES if p != THE_MODULE], ids=str)
def test_private_names_of_torch_stand_in_one_module(path):
    assert not list(private_names(trees()[path], own_names()))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._x()",
        "import torch._utils",
        "from torch._C import Work",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "from torch.nn.parallel import DataParallel as D\nD._x = 3",
        "def f(overload): return overload._schema",
        "def f(iterator): getattr(iterator, '_shutdown_workers')()",
    ],
)
def test_a_private_name_would_be_found(source):
    assert list(private_names(ast.parse(source), set()))


@pytest.mark.parametrize("name", ["_C._is_view_replay_enabled", "Tensor._reduce_ex_internal"])
def test_a_name_that_torch_lacks_is_told_at_import_with_the_versions_that_have_it(name):
    holder, _, last = name.rpartition(".")
    program = f"""
import torch
class Hidden(type(torch._C)):
    def __getattribute__(self, name):
        if name == {last!r}:
            raise AttributeError(name)
        return super().__getattribute__(name)
{"torch._C.__class__ = Hidden" if holder == "_C" else f"del torch.{name}"}
import ltc
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True)
    assert f"lacks torch.{name}, which ltc is built on" in run.stderr
    assert "Use a torch from 2.10 up to (without) 2.16." in run.stderr


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.9.1+cpu", "ImportError: ltc needs torch >= 2.10: torch 2.9.1+cpu cannot host a device"),
        ("2.16.0", "UserWarning: ltc has not been tested with torch 2.16.0, only with 2.10 up to"),
    ],
)
def test_another_version_of_torch_is_told_once(monkeypatch, version, said):
    monkeypatch.setattr(torch_private.torch, "__version__", version)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            torch_private.require()
            told = [f"{one.category.__name__}: {one.message}" for one in warned]
        except ImportError as error:
            told = [f"ImportError: {error}"]
    assert len(told) == 1 and told[0].startswith(said)
