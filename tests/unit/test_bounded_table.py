"""Tables of what can be found again: bounded, and what is forgotten is counted."""

from concurrent.futures import ThreadPoolExecutor

import torch

from ltc.debug import metrics
from ltc.device.shapes import meta
from ltc.support.bounded_table import BoundedTable


def test_the_oldest_half_makes_room():
    table = BoundedTable("Squares", 10)
    with metrics.counted() as grown:
        for number in range(25):
            assert table.keep(number, number**2) == number**2
            assert len(table) <= 10 and table[number] == number**2
    assert grown["Forgotten.Squares"] == 25 - len(table)
    assert list(table) == list(range(25 - len(table), 25))


def test_who_comes_second_gets_the_first_answer():
    table = BoundedTable("Words", 10)
    first, second = ("an answer",), ("an answer",)
    assert table.keep("key", first) is first and table.keep("key", second) is first


def test_threads_fill_one_table_to_its_bound():
    table = BoundedTable("Numbers", 64)

    def fill(thread: int) -> bool:
        return all(table.keep((thread, n), n) == n for n in range(5000))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fill, range(8)))
    assert len(table) <= 64 + 8


def test_types_of_many_shapes_are_bounded(monkeypatch):
    monkeypatch.setattr(meta, "_known", BoundedTable("ResultTypes", 32))
    with metrics.counted() as grown:
        for length in range(1, 101):
            (torch.ones(length, device="ltc") @ torch.ones(length, 2, device="ltc")).cpu()
    assert grown["Forgotten.ResultTypes"] > 0 and len(meta._known) <= 32
