"""Replicas of ltm that differ in anything that changes a result: all raise one report, or all are right."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.debug import metrics
from ltc.errors import PeerFailure

sys.path.insert(0, str(Path(__file__).parent))

from replicas import in_processes, in_threads, values, whole_tables

pytestmark = pytest.mark.devices(4)

SMALL, LARGE = 6, 300_000


def ones(device, *shape, dtype=torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def gradient_of(device) -> torch.optim.Optimizer:
    parameter = ones(device, 3).requires_grad_()
    parameter.sum().backward()
    return torch.optim.SGD([parameter], lr=1.0)


def reduced_gradient(device, reduce) -> torch.Tensor:
    optimizer = gradient_of(device)
    ltm.reduce_gradients(optimizer, reduce=reduce)
    return optimizer.param_groups[0]["params"][0].grad


def broadcast(device, root) -> torch.Tensor:
    x = ones(device, 3)
    ltm.collective_broadcast([x], root)
    return x


# What replica `i` does, which is 0 or 1.
DIFFERENT = {
    "scale": lambda i, d: ltm.all_reduce("sum", ones(d, SMALL), scale=(0.5, 0.25)[i]),
    "scale of a large sum": lambda i, d: ltm.all_reduce("sum", ones(d, LARGE), scale=1.0 + i),
    "scale of a maximum": lambda i, d: ltm.all_reduce("max", ones(d, SMALL), scale=1.0 - i),
    "scale of a list": lambda i, d: ltm.all_reduce("sum", [ones(d, SMALL)], scale=1.0 + i)[0],
    "scale of a scatter": lambda i, d: ltm.reduce_scatter("sum", ones(d, 4), 1.0 + i, 0, 2),
    "mean or sum": lambda i, d: reduced_gradient(d, ("mean", "sum")[i]),
    "reduction": lambda i, d: ltm.all_reduce(("sum", "mul")[i], ones(d, SMALL)),
    "dtype of as many bytes": lambda i, d: ltm.all_reduce(
        "sum", ones(d, SMALL, dtype=(torch.float32, torch.int32)[i])
    ),
    "length": lambda i, d: ltm.all_reduce("sum", ones(d, SMALL + i)),
    "length of a large sum": lambda i, d: ltm.all_reduce("sum", ones(d, LARGE + i)),
    "shape": lambda i, d: ltm.all_reduce("sum", ones(d, *((2, 3), (3, 2))[i])),
    "dim of a gather": lambda i, d: ltm.all_gather(ones(d, 2, 2), dim=i),
    "dim of a scatter": lambda i, d: ltm.reduce_scatter("sum", ones(d, 2, 2), 1.0, i, 2),
    "dims of an all_to_all": lambda i, d: ltm.all_to_all(ones(d, 2, 2), i, 1 - i, 2),
    "root": lambda i, d: broadcast(d, i),
    "pairs": lambda i, d: ltm.collective_permute(ones(d, 2), [(0, 1)] if i else [(1, 0)]),
    "groups": lambda i, d: ltm.all_reduce("sum", ones(d, 2), groups=[[0, 1]] if i else [[1, 0]]),
    "kind": lambda i, d: ltm.all_gather(ones(d, 2)) if i else ltm.all_reduce("sum", ones(d, 2)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_threads_that_differ_raise_one_report_with_their_lines(what):
    with whole_tables():
        found = in_threads(lambda i, d: DIFFERENT[what](i, d).cpu(), 2)
    assert all(isinstance(one, PeerFailure) for one in found), found
    assert found[0].args == found[1].args
    assert str(found[0]).count("test_disagreements.py") == 2


def differ(ordinal: int) -> list[str]:
    """One of `DIFFERENT`, as a process."""
    what = os.environ["DIFFERENT"]
    ltm.rendezvous("all are here")
    with whole_tables():
        return DIFFERENT[what](ordinal, "ltc:0").tolist()


@pytest.mark.parametrize("transport", ["auto", "hosts"])
@pytest.mark.parametrize("what", ["scale", "scale of a large sum", "scale of a scatter", "root"])
def test_processes_that_differ_raise_one_report(what, transport):
    found = in_processes(__file__, "differ", 2, DIFFERENT=what, LTC_TRANSPORT=transport)
    assert str(found[0]) == str(found[1])
    assert str(found[0]).startswith("PeerFailure: Replicas do not run the same collectives")


def scales_of_each_step(i: int, device: str, differ_at: int = -1) -> list[float]:
    found = []
    for step in range(40):
        scale = 1.0 / (step + 2 + (step == differ_at and i))
        found.append(ltm.all_reduce("sum", ones(device, 3), scale=scale)[0].item())
        found.append(ltm.reduce_scatter("max", ones(device, 2), scale, 0, 2)[0].item())
    return found


def test_a_scale_may_be_another_one_in_each_step():
    with metrics.counted() as grown:
        found = values(in_threads(scales_of_each_step, 2))
    expected = [k / (step + 2) for step in range(40) for k in (2.0, 1.0)]
    assert found[0] == found[1] == pytest.approx(expected)
    assert grown.get("UncachedCompile", 0) < 2 * 40  # once many have come, they are operands


def test_a_scale_that_differs_late_is_found():
    found = in_threads(lambda i, d: scales_of_each_step(i, d, differ_at=30), 2)
    assert all(isinstance(one, PeerFailure) for one in found), found


# --- threads of one replica ---------------------------------------------------------------------


def sums_of_two_threads(ordinal: int) -> list:
    """What each of two threads sums, in turns that differ from replica to replica if told so."""
    crossed, elements = os.environ["CROSSED"] == "1", int(os.environ["ELEMENTS"])
    first_is_over, found = threading.Event(), [None, None]

    def sums(number: int, is_first: bool) -> None:
        if not is_first:
            first_is_over.wait()
        try:
            mine = torch.full((elements,), 10.0**number * (ordinal + 1), device="ltc")
            found[number] = [ltm.all_reduce("sum", mine)[0].item() for _ in range(3)]
        except PeerFailure as error:
            found[number] = str(error)
        first_is_over.set()

    first = ordinal if crossed else 0
    threads = [threading.Thread(target=sums, args=(k, k == first)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("elements", [3, 100_000])
def test_threads_of_a_replica_that_come_in_one_order_are_right(elements):
    found = in_processes(__file__, "sums_of_two_threads", 2, CROSSED="0", ELEMENTS=str(elements))
    assert values(found) == [[[3.0] * 3, [30.0] * 3]] * 2


@pytest.mark.parametrize("elements", [3, 100_000])
def test_threads_of_a_replica_that_come_in_another_order_are_found(elements):
    found = values(
        in_processes(__file__, "sums_of_two_threads", 2, CROSSED="1", ELEMENTS=str(elements))
    )
    for of_replica in found:
        assert all("in thread 'Thread-" in text for text in of_replica), of_replica


def test_a_thread_beside_the_main_one_exchanges_when_its_turn_has_come():
    assert values(in_processes(__file__, "main_and_thread")) == [[3.0, 30.0, 3.0]] * 2


def main_and_thread(ordinal: int) -> list[float]:
    def total(factor: float) -> None:
        mine = torch.full((3,), factor * (ordinal + 1), device="ltc")
        found.append(ltm.all_reduce("sum", mine)[0].item())
        ltm.rendezvous("both")

    found: list[float] = []
    total(1.0)
    thread = threading.Thread(target=total, args=(10.0,))
    thread.start()
    thread.join()
    total(1.0)
    return found


def test_scales_that_only_some_replicas_have_used_change_nothing_for_the_others():
    """What one thread or one subgroup has summed before decides nothing of the next sum of all."""

    def step(ordinal: int, device: str) -> list[float]:
        for number in range(20 if ordinal == 0 else 0):
            ltm.all_reduce(
                "sum", torch.ones(1, device=device), scale=1 + number / 7, groups=[[0], [1]]
            )
        return [
            ltm.all_reduce("sum", torch.ones(2, device=device), scale=scale).tolist()[0]
            for scale in (0.5, 0.3, 1 / 3, 4, 0.3)
        ]

    assert in_threads(step, 2) == [pytest.approx([1, 0.6, 2 / 3, 8, 0.6])] * 2
