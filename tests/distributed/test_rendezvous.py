"""Rendezvous, and what is built on it: payloads in ordinal order, subsets, and what goes wrong."""

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch

import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser
from ltc.distributed.mesh import values_of_all
from ltc.distributed.transport import session
from ltc.distributed.transport.collective_schedule import tree_children, tree_parent
from ltc.errors import PeerFailure

sys.path.insert(0, str(Path(__file__).parent))

from replicas import in_threads, values, wait_until_others_are_in

pytestmark = pytest.mark.devices(4)


def test_everyone_gets_every_payload_in_ordinal_order():
    sizes = [0, 3, 700_000, 1]  # one is larger than a message
    found = values(in_threads(lambda i, d: ltm.rendezvous("tag", bytes([i]) * sizes[i])))
    assert all(one == [bytes([i]) * n for i, n in enumerate(sizes)] for one in found)


def test_a_rendezvous_alone_returns_its_payload():
    assert ltm.rendezvous("tag", b"x") == [b"x"]
    assert ltm.mesh_reduce("tag", 3, max) == 3


def test_a_payload_is_bytes():
    with pytest.raises(TypeError, match="pass bytes"):
        ltm.rendezvous("tag", "text")


def test_subsets_meet_on_their_own():
    groups = {0: [0, 3], 3: [0, 3], 1: [1, 2], 2: [2, 1]}
    found = values(in_threads(lambda i, d: ltm.rendezvous("tag", b"%d" % i, groups[i])))
    assert found == [[b"0", b"3"], [b"1", b"2"], [b"1", b"2"], [b"0", b"3"]]


@pytest.mark.parametrize(
    "replicas, text",
    [
        ([0, 0, 1, 2, 3], "Duplicate ordinal: 0"),
        ([0, 9], "Invalid ordinal: 9"),
    ],
)
def test_a_list_of_replicas_that_cannot_be_is_refused(replicas, text):
    found = in_threads(lambda i, d: ltm.rendezvous("tag", b"", replicas))
    assert all(isinstance(one, ValueError) and text in str(one) for one in found)


def test_different_lists_under_one_tag_raise_naming_both():
    lists = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 3]]
    found = in_threads(lambda i, d: ltm.rendezvous("tag", b"", lists[i]))
    assert all(isinstance(one, PeerFailure) for one in found), found
    assert len({str(one) for one in found}) == 1
    assert "'tag' of [0, 1, 2, 3]" in str(found[0]) and "'tag' of [0, 3]" in str(found[0])


def test_different_tags_raise_naming_both():
    found = in_threads(lambda i, d: ltm.rendezvous("left" if i == 1 else "right"))
    assert all(isinstance(one, PeerFailure) for one in found), found
    assert "'left'" in str(found[0]) and "'right'" in str(found[0])


def test_an_absent_replica_is_named(monkeypatch):
    def stay_away(i, d):
        if i != 2:
            return ltm.rendezvous("tag")
        wait_until_others_are_in("rendezvous", session.current().host)
        monkeypatch.setenv("LTC_PEER_TIMEOUT", "1.5")

    found = in_threads(stay_away)
    assert "Replica(s) 2 did not enter within 1.5 s" in str(found[0])


def test_pending_collectives_are_started_before_it():
    def meet(i, d):
        total = ltm.all_reduce("sum", torch.ones(2, device=d))
        if i == 0:
            return total.cpu()[0].item()  # needs the others, who only come to the rendezvous below
        ltm.rendezvous("tag", b"", [1, 2, 3])
        return total.cpu()[0].item()

    assert values(in_threads(meet)) == [4.0] * 4


def test_mesh_reduce_reduces_values_of_any_kind():
    def reduce(i, d):
        number = ltm.mesh_reduce("number", i, sum)
        tensors = ltm.mesh_reduce(
            "tensor", torch.full((2,), float(i), device=d), lambda v: torch.stack(v).sum(0)
        )
        return number, tensors.device.type, tensors.tolist()

    assert values(in_threads(reduce)) == [(6, "cpu", [6.0, 6.0])] * 4


@dataclass
class Point:
    x: float
    y: dict


def test_mesh_reduce_takes_what_its_caller_has_too():
    """Numbers of numpy, frozen sets, and classes of the caller's own."""

    def reduce(i, d):
        mine = Point(numpy.float64(i), {"set": frozenset({i}), "array": numpy.full(2, i)})
        return ltm.mesh_reduce("mine", mine, list)

    for found in values(in_threads(reduce, 2)):
        assert [type(one) for one in found] == [Point] * 2
        assert [one.y["set"] for one in found] == [{0}, {1}]
        assert found[1].x == 1 and found[1].y["array"].tolist() == [1, 1]


class Intruder:
    """Runs code of its sender's choice where it is unpickled."""

    def __reduce__(self):
        return exec, ("import builtins; builtins.intruded = True",)


def test_nothing_that_a_replica_sends_runs_code_on_another():
    def reduce(i, d):
        return values_of_all("mine", Intruder() if i else 1.0)

    innocent, _ = in_threads(reduce, 2)
    assert isinstance(innocent, TypeError) and "cannot be unpickled" in str(innocent)
    assert not any(one is exec for one in torch.serialization.get_safe_globals())


def test_do_on_ordinals_calls_on_the_listed_ones_and_all_wait():
    called = threading.Event()

    def act(i, d):
        def target(x):
            time.sleep(0.1)
            called.set()
            return x.device.type, x.tolist()

        result = ltm.do_on_ordinals(target, (torch.full((2,), float(i), device=d),), (1,))
        return result, called.is_set()

    found = values(in_threads(act))
    assert found[1] == (("cpu", [1.0, 1.0]), True)
    assert [one for i, one in enumerate(found) if i != 1] == [(None, True)] * 3


@pytest.mark.parametrize("save, load", [(ltm.save, torch.load), (xser.save, xser.load)])
def test_with_a_barrier_a_save_returns_everywhere_when_the_file_is_complete(tmp_path, save, load):
    path = tmp_path / "file"

    def act(i, d):
        save({"x": torch.full((3,), float(i), device=d)}, path, global_master=True, barrier=True)
        return load(path)["x"].tolist()

    assert values(in_threads(act)) == [[0.0] * 3] * 4


def test_without_a_barrier_a_save_that_only_some_replicas_reach_returns(tmp_path):
    def act(i, d):
        if i == 0:
            ltm.save({"x": torch.zeros(3, device=d)}, tmp_path / "file", global_master=True)
            xser.save({"x": torch.zeros(3, device=d)}, tmp_path / "other", global_master=True)
        return i

    assert values(in_threads(act)) == [0, 1, 2, 3]
    assert (tmp_path / "file").exists() and (tmp_path / "other").exists()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 4096])
def test_the_tree_reaches_everyone_over_few_steps(size):
    for position in range(size):
        for child in tree_children(position, size):
            assert tree_parent(child) == position
        assert len(tree_children(position, size)) <= size.bit_length()
    depth, position = 0, size - 1
    while position:
        position, depth = tree_parent(position), depth + 1
    assert depth <= size.bit_length()
    assert sum(len(tree_children(p, size)) for p in range(size)) == size - 1
