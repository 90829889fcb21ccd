"""`help(name)` is enough to use a public name: it says what you get and what is raised, by example.

The examples run one after another in this process; replicas in them are forked.  What they may take
for granted is below, in `IMPORTED`.
"""

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm

MODULES = (
    "ltc",
    "ltc.core.functions",
    "ltc.core.lazy_model",
    "ltc.distributed.bucketed",
    "ltc.distributed.collective_context",
    "ltc.distributed.collectives",
    "ltc.distributed.data_parallel",
    "ltc.distributed.lazy_multiprocessing",
    "ltc.distributed.mesh",
    "ltc.distributed.parallel_loader",
    "ltc.distributed.process_group",
    "ltc.distributed.rendezvous",
    "ltc.checkpointing.resumable",
    "ltc.utils.checkpoint",
    "ltc.utils.checkpoint_tagger",
    "ltc.utils.serialization",
)
IMPORTED = {"torch": torch, "ltc": ltc, "ltm": ltm, "__name__": "example"}
# Public names without an example, each with the reason.
WITHOUT_EXAMPLE = {
    "ltc.distributed.rendezvous.gather_payloads": "it needs a wire: `rendezvous` calls it",
}
# Names of ltm and of collectives: the first says as much as the second, which it calls.
FRONT_DOOR = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective_permute",
    "recv",
    "reduce_gradients",
    "reduce_scatter",
    "send",
)
ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Failure|Failed|File)\b")


def public_names(module) -> list[str]:
    """What the module offers: its __all__, or the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def documented() -> Iterator[tuple[str, object]]:
    """Each function and class that has a public name, once."""
    seen = set()
    for module in map(importlib.import_module, MODULES):
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.ismodule(value):  # ltc.device, which is called like a function
                value = type(value).__call__
            if callable(value) and value not in seen:
                seen.add(value)
                yield f"{module.__name__}.{name}", value


PUBLIC = dict(documented())
every_public_name = pytest.mark.parametrize("name", PUBLIC)


def raised_by(function) -> set[str]:
    """The names of the errors that stand behind `raise` in a function's own body."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    return {name for node in ast.walk(tree) if (name := _raised(node))}


def _raised(node: ast.AST) -> str:
    if isinstance(node, ast.Assert):
        return "AssertionError"
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return getattr(node.exc.func, "id", "")
    return ""


def methods_of(value) -> Iterator[tuple[str, object]]:
    """What is called of a class beside the class itself: its public methods, and how it is made."""
    for name, member in vars(value).items():
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        is_called = not name.startswith("_") or name in SPECIAL
        if inspect.isfunction(member) and is_called and _has_source(member):
            yield name, member


def _has_source(function) -> bool:
    """Whether somebody wrote it; what a dataclass makes, nobody did."""
    return inspect.unwrap(function).__code__.co_filename != "<string>"


SPECIAL = ("__init__", "__call__", "__iter__", "__next__")


def examples_of(name: str) -> doctest.DocTest:
    text = inspect.getdoc(PUBLIC[name]) or ""
    return doctest.DocTestParser().get_doctest(text, dict(IMPORTED), name, None, 0)


@every_public_name
def test_a_public_name_has_a_docstring_with_an_example(name):
    assert PUBLIC[name].__doc__, f"help({name}) says nothing"
    assert bool(examples_of(name).examples) != (name in WITHOUT_EXAMPLE)


@every_public_name
def test_the_examples_of_a_public_name_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # they may write files
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(examples_of(name), out=said.append)
    assert not runner.failures, "".join(said)


@every_public_name
def test_a_docstring_names_every_error_that_is_raised_on_purpose(name):
    value = PUBLIC[name]
    whole = inspect.getdoc(value) or ""
    called = dict(methods_of(value)) if inspect.isclass(value) else {"": value}
    silent = {
        method: missing
        for method, function in called.items()
        if (missing := raised_by(function) - set(ERROR.findall(whole + (function.__doc__ or ""))))
    }
    assert not silent


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if inspect.isclass(v)])
def test_every_public_method_of_a_class_has_a_docstring(name):
    public = [(n, f) for n, f in methods_of(PUBLIC[name]) if not n.startswith("_")]
    ruled = (torch.autograd.Function, torch.nn.Module)  # torch says what forward is
    if not issubclass(PUBLIC[name], ruled):
        assert [n for n, f in public if not f.__doc__] == []


@pytest.mark.parametrize("name", FRONT_DOOR)
def test_ltm_names_every_error_that_what_it_calls_names(name):
    behind = inspect.getdoc(PUBLIC[f"ltc.distributed.collectives.{name}"])
    assert set(ERROR.findall(behind)) <= set(ERROR.findall(getattr(ltm, name).__doc__))
