"""Marks of tests: those that leave the settings of users say why, and an order keeps files together."""

import ast
import random
from itertools import groupby
from pathlib import Path

import pytest

from ltc import config
from ltc.device.recording import recorder
from tests import marks
from tests.orders import in_another_order

TESTS = Path(__file__).parents[1]


def natives_of(source: str) -> list[ast.expr]:
    """What stands behind each `native` of the text: a call, or the mark alone."""
    tree = ast.parse(source)
    called = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return [
        called.get(node, node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.native"
    ]


def has_reason(mark: ast.expr) -> bool:
    """Whether it is given one text, of several words."""
    if not isinstance(mark, ast.Call) or len(mark.args) != 1 or mark.keywords:
        return False
    return isinstance(mark.args[0], ast.Constant) and len(str(mark.args[0].value).split()) > 2


def test_every_native_mark_has_a_reason():
    without = [
        f"{path.relative_to(TESTS)}:{mark.lineno}"
        for path in sorted(TESTS.rglob("*.py"))
        if "mark.native" in (text := path.read_text())
        for mark in natives_of(text)
        if not has_reason(mark)
    ]
    assert not without


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("pytest.mark.native('it reads the text of a kernel')", True),
        ("pytest.mark.native", False),
        ("pytest.mark.native()", False),
        ("pytest.mark.native('compiled')", False),
        ("pytest.mark.native(WHY)", False),
    ],
)
def test_a_reason_is_a_text_of_several_words(text, good):
    assert [has_reason(mark) for mark in natives_of(f"x = {text}")] == [good]


def test_devices_are_there_while_they_are_asked_for():
    first = recorder.devices()[0]
    with marks.devices(3):
        several = list(recorder.devices())
        assert len(several) == config.value("LTC_NUM_DEVICES") == 3
    assert recorder.devices() == [first]
    with marks.devices(2):
        assert recorder.devices() == several[:2]
    assert recorder.devices() == [first] and config.value("LTC_NUM_DEVICES") == 1


class Item:
    def __init__(self, path: str, cls: str, name: int) -> None:
        self.path, self.cls, self.name = path, cls, name

    def place(self) -> tuple[str, str]:
        return self.path, self.cls


def test_another_order_keeps_the_tests_of_a_class_together():
    items = [Item(path, cls, name) for path in "abcd" for cls in "xyz" for name in range(5)]
    ordered = in_another_order(items, random.Random(1))
    assert sorted(map(id, ordered)) == sorted(map(id, items)) and ordered != items
    assert len(list(groupby(ordered, lambda item: item.path))) == 4
    assert len(list(groupby(ordered, Item.place))) == 12
    assert [i.name for i in ordered[:5]] != [0, 1, 2, 3, 4]
    assert (
        ordered
        == in_another_order(items, random.Random(1))
        != in_another_order(items, random.Random(2))
    )
