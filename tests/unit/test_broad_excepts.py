"""An `except Exception` raises again, hands the error over, or says that it is a fault of ltc's own."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ltc"
BROAD = {"Exception", "BaseException"}
# Handlers of what the program's own classes do, and of what has been told otherwise: file -> how many.
DROPS_THE_ERROR = {
    "distributed/collectives.py": 2,  # at the end of the program: nobody is left to hear it
    "distributed/data_parallel.py": 1,  # one error is raised: others are what it brought about
    "distributed/launch/child.py": 2,  # an exception that cannot be pickled; a stream that is closed
    "distributed/launch/parent.py": 1,  # an exception of a class of the rank's: its text is told
    "profiling/last_lines.py": 1,  # at the end of the program: the traceback is printed
    "replay/contents.py": 1,  # an attribute of the program's own object
    "tracebacks.py": 1,  # an exception that cannot be copied is raised itself
}


def suppresses(node: ast.AST) -> bool:
    """True of `contextlib.suppress(Exception)`, as code that drops the error."""
    if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "suppress":
        return False
    return any(isinstance(one, ast.Name) and one.id in BROAD for one in node.args)


def is_broad(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(type is None or (isinstance(type, ast.Name) and type.id in BROAD) for type in types)


def hands_over(handler: ast.ExceptHandler) -> bool:
    nodes = [node for statement in handler.body for node in ast.walk(statement)]
    if any(isinstance(node, ast.Raise) for node in nodes):
        return True
    return any(isinstance(node, ast.Name) and node.id == handler.name for node in nodes)


def dropped_in(path: Path) -> list[int]:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    handlers = [node for node in nodes if isinstance(node, ast.ExceptHandler)]
    dropped = [one for one in handlers if is_broad(one) and not hands_over(one)]
    return sorted(one.lineno for one in [*dropped, *filter(suppresses, nodes)])


def test_no_broad_handler_drops_its_error_but_those_with_a_reason():
    dropped = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := dropped_in(path))
    }
    allowed = DROPS_THE_ERROR
    assert not {f: lines for f, lines in dropped.items() if len(lines) > allowed.get(f, 0)}


def test_a_handler_that_drops_its_error_is_found(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        "try:\n    a()\nexcept Exception:\n    b()\n"
        "try:\n    a()\nexcept (KeyError, BaseException) as error:\n    b()\n"
        "try:\n    a()\nexcept:\n    pass\n"
        "try:\n    a()\nexcept Exception as error:\n    faults.note(error, 'a')\n"
        "try:\n    a()\nexcept BaseException:\n    b()\n    raise\n"
        "try:\n    a()\nexcept KeyError:\n    pass\n"
        "with contextlib.suppress(KeyError, Exception):\n    a()\n"
        "with contextlib.suppress(OSError):\n    a()\n"
    )
    assert dropped_in(file) == [3, 7, 11, 26]
