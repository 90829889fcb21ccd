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
from pathlib import Path

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm

MODULES = (
    "ltc",
    "ltc.core.functions",
    "ltc.core.lazy_model",
    "ltc.distributed.bucketed",
    "ltc.core.replicas",
    "ltc.distributed.collectives",
    "ltc.distributed.data_parallel",
    "ltc.distributed.lazy_multiprocessing",
    "ltc.distributed.mesh",
    "ltc.distributed.parallel_loader",
    "ltc.distributed.registration",
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


OF_USERS = [name for name in PUBLIC if re.fullmatch(r"ltc(\.core\.lazy_model)?\.\w+", name)]


def sections_missing(name: str) -> list[str]:
    """Return the sections of Google's layout that a name's signature asks for, and its docstring lacks."""
    value, text = PUBLIC[name], inspect.getdoc(PUBLIC[name]) or ""
    signature = inspect.signature(value)
    has_parameters = bool(set(signature.parameters) - {"self"})
    returns = not inspect.isclass(value) and signature.return_annotation not in ("None", None)
    asked = {
        "Args:": has_parameters,
        "Returns:": returns and not text.startswith("Return ") and "Yields:" not in text,
        "Raises:": not inspect.isclass(value) and bool(raised_by(value)),
        "Example:": True,
    }
    found = set(text.splitlines())
    if inspect.isclass(value) and "Attributes:" in found:
        found.add("Args:")
    return [section for section, is_asked in asked.items() if is_asked and section not in found]


def test_the_names_that_users_call_have_args_returns_raises_and_an_example():
    assert len(OF_USERS) >= 40
    assert {name: missing for name in OF_USERS if (missing := sections_missing(name))} == {}


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


ROOT = Path(ltc.__file__).parents[1]
# A first line says what there is or is done; a relative clause without its noun leaves that open.
FRAGMENT = re.compile(
    r"(What|Whether|Who|Whom|Whose|Whoever|Of|Those|That|Where|How|Which|Why|As|Likewise)\b"
)
# A row of a table where the first line should stand: "known     the values of the inputs".
ROW = re.compile(r"\w+ {2,}\w")
# A person for a thread, a process, a tensor; "whose" after its noun is fine.
PERSONS = re.compile(r"\b(who|whom|nobody|somebody|anybody|everybody|whoever)\b", re.IGNORECASE)
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):$")
ENTRY = re.compile(r"    (?:[\w*`][\w*`., ]*: )?(\S.*)$")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
WITH_PERSONS = {"_trusted": "the user `nobody` of the system"}


def docstrings_in(source: str) -> Iterator[tuple[ast.AST, str]]:
    """Every docstring, private ones too, with its definition."""
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, DEFINITIONS) else None
        if text:
            yield node, text


def entries_of(text: str) -> Iterator[tuple[str, str]]:
    """(section, text behind the name) of each entry of a docstring's sections."""
    section = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            found = SECTION.match(line)
            section = found[1] if found else ""
        elif section and (entry := ENTRY.match(line)):
            yield section, entry[1]


def fragments_in(source: str) -> list[str]:
    """Return what a reader stumbles over in docstrings: see the patterns above."""
    found = []
    for node, text in docstrings_in(source):
        first = text.partition("\n")[0]
        if FRAGMENT.match(first) or ROW.match(first):
            found.append(first)
        if PERSONS.search(text) and getattr(node, "name", "") not in WITH_PERSONS:
            found.append(PERSONS.search(text)[0])
        entries = list(entries_of(text))
        found += [entry for _, entry in entries if FRAGMENT.match(entry)]
        if isinstance(node, ast.ClassDef) and any(section == "Returns" for section, _ in entries):
            found.append(f"Returns: of class {node.name}")
    return found


@pytest.mark.parametrize("folder", ["ltc", "scripts"])
def test_docstrings_are_sentences_with_their_nouns(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {
        str(file): fragments for file in files if (fragments := fragments_in(file.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('def f():\n    """Whether it is."""\n', ["Whether it is."]),
        ('def f():\n    """Return True if it is."""\n', []),
        ('def f():\n    """known     the inputs"""\n', ["known     the inputs"]),
        ('def f():\n    """Return a tensor that nobody reads."""\n', ["nobody"]),
        ('def f():\n    """Return the node whose value it is."""\n', []),
        (
            'def f(x):\n    """Do it.\n\n    Args:\n        x: Of the result.\n    """\n',
            ["Of the result."],
        ),
        (
            'def f():\n    """Do it.\n\n    Returns:\n        What it made.\n    """\n',
            ["What it made."],
        ),
        (
            'class C:\n    """One.\n\n    Returns:\n        A number.\n    """\n',
            ["Returns: of class C"],
        ),
    ],
)
def test_a_fragment_in_a_docstring_is_found(source, found):
    assert fragments_in(source) == found


def without_help(source: str) -> list[str]:
    """The arguments of a command that `--help` shows without a text."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call.args[0])
        for call in calls
        if getattr(call.func, "attr", "") == "add_argument"
        and not {"help"} & {keyword.arg for keyword in call.keywords}
    ]


@pytest.mark.parametrize("folder", ["ltc", "scripts"])
def test_every_argument_of_a_command_has_a_help_text(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert not {str(file): bare for file in files if (bare := without_help(file.read_text()))}


def test_an_argument_without_a_help_text_is_found():
    assert without_help('parser.add_argument("--seed", type=int)') == ["'--seed'"]
    assert not without_help('parser.add_argument("--seed", help="the first seed")')
