"""One name for one thing: what a reader has seen once is not something else elsewhere."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ltc"
FILES = sorted(PACKAGE.rglob("*.py"))

# Module names that stand in several folders, each with the reason.
SEVERAL_TIMES = {
    "__main__": "what `python -m` runs, of ltc and of its stand-in for torch_xla",
    "attention": "the rule that traces it, and what the reference computes for its node",
    "autocast": "what users import, under torch's own name, and what torch's dispatcher asks",
    "closures": "the names that users import, and the module below every layer that defines them",
    "collective": "what an exchange is, and the rule that traces it",
    "metrics": "the names that users import, and the module below every layer that defines them",
    "metrics_saver": "the names that users import, and the module below every layer that defines them",
    "nchw": "a layout of memory, of convolutions and of pooling",
    "nhwc": "a layout of memory, of convolutions and of pooling",
    "philox": "one generator of random bits: in torch for the reference, and as LLVM text",
    "profiler": "the names that users import, and the module below every layer that defines them",
    "shared_counters": "the LLVM text of counters, and what replicas of every backend call",
}


def places_of_modules() -> dict[str, list[str]]:
    places = defaultdict(list)
    for path in FILES:
        if path.name != "__init__.py":
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    return places


def test_a_module_name_stands_once_or_for_a_reason():
    several = {name: where for name, where in places_of_modules().items() if len(where) > 1}
    assert set(several) == set(SEVERAL_TIMES), several


def test_no_two_classes_share_a_name():
    places = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}
