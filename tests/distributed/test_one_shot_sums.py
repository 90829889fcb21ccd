"""Sums over few replicas of a host: each writes its operands where the others read and add them."""

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.distributed.transport import session, shm_segment, symmetric_memory
from ltc.errors import PeerFailure
from ltc.ir import ops
from ltc.ir.collective import Collective
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import make
from ltc.ir.tensor_type import TensorType
from ltc.llvm.native import shared_counters
from ltc.passes.one_shot_all_reduce import one_shot_sums

sys.path.insert(0, str(Path(__file__).parent))
from replicas import in_processes, in_threads, values

pytestmark = pytest.mark.devices(4)

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (129, 65), (0, 3)]
DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.float16]


def drawn(ordinal: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Operand `number` of a replica."""
    draw = torch.Generator().manual_seed(100 * number + ordinal)
    shape = SHAPES[number % len(SHAPES)]
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=draw) * 100).to(dtype)
    return torch.randint(-(1 << 30), 1 << 30, shape, generator=draw).to(dtype)


def summed(replicas, operand) -> torch.Tensor:
    """In their order, wide and rounded once where the dtype is narrow."""
    first, *others = [operand(r) for r in replicas]
    narrow = first.dtype in (torch.bfloat16, torch.float16)
    total = first.float() if narrow else first
    for other in others:
        total = total + other
    return total.to(first.dtype)


def sums_of_all_types(ordinal, device=None):
    device = device or ltm.lazy_device()
    found = []
    for dtype in DTYPES:
        mine = [drawn(ordinal, n, dtype).to(device) for n in range(len(SHAPES))]
        found += ltm.all_reduce("sum", [x.clone() for x in mine])
        found += [ltm.all_reduce("sum", x * 1) for x in mine]
    ltm.mark_step()
    return [x.cpu() for x in found]


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_sums_are_those_of_the_ordinals_in_their_order(replicas):
    expected = []
    for dtype in DTYPES:
        one = [summed(range(replicas), lambda r: drawn(r, n, dtype)) for n in range(len(SHAPES))]
        expected += one + one
    for found in values(in_threads(sums_of_all_types, replicas)):
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)


def slots_of_a_new_sum(ordinal, device):
    before = len(session.current().one_shot_reducer.slots)
    ltm.all_reduce("sum", torch.ones(11, 13).to(device))  # no other test has this shape
    ltm.mark_step(wait=True)
    return len(session.current().one_shot_reducer.slots) - before


@pytest.mark.parametrize("backend, slots", [("eager", 0), ("llvm", 1)])
def test_only_a_backend_that_can_add_gets_a_place_for_operands(backend, slots):
    with config.override(LTC_BACKEND=backend):
        assert values(in_threads(slots_of_a_new_sum, 2)) == [slots, slots]


def test_processes_have_the_bits_of_threads():
    of_threads = values(in_threads(sums_of_all_types, 3))
    for found in values(in_processes(__file__, "sums_of_all_types", 3)):
        assert all(map(torch.equal, found, of_threads[0]))


def test_operands_may_be_views_inputs_and_the_same_twice():
    def add(i, d):
        x = torch.arange(24.0).reshape(4, 6).mul(i + 1).to(d)
        ltm.mark_step(d)  # from here on an input
        left, right = x.t(), x[1:3, ::2]
        found = ltm.all_reduce("sum", [left.clone(), right * 1, x.clone()])
        found += [ltm.all_reduce("sum", x), ltm.all_reduce("sum", x), ltm.all_reduce("sum", left)]
        return [one.cpu() for one in found]

    x = torch.arange(24.0).reshape(4, 6) * 6
    for found in values(in_threads(add, 3)):
        assert all(map(torch.equal, found, [x.t(), x[1:3, ::2], x, x, x, x.t()]))


def test_groups_add_among_themselves():
    def add(i, d):
        x = torch.full((5,), float(i), device=d)
        near = ltm.all_reduce("sum", x, groups=[[0, 1], [2, 3]])
        far = ltm.all_reduce("sum", near, groups=[[2, 0], [3, 1]])
        return near[0].item(), far[0].item()

    assert values(in_threads(add)) == [(1.0, 6.0), (1.0, 6.0), (5.0, 6.0), (5.0, 6.0)]


def test_groups_of_one_give_what_each_has():
    def add(i, d):
        operands = [torch.full((3,), i + 1, dtype=dtype, device=d) for dtype in DTYPES]
        return [ltm.all_reduce("sum", x, groups=[[0], [1], [2]]).tolist() for x in operands]

    for i, found in enumerate(values(in_threads(add, 3))):
        assert found == [[i + 1] * 3] * len(DTYPES)


def test_replicas_may_cut_their_steps_at_other_places():
    """One reads every value at once, one marks now and then, one runs all as one program."""

    def add(i, d):
        x, found = torch.ones(300, device=d), []
        for number in range(40):
            x = ltm.all_reduce("sum", x * (i + 1), scale=1 / 6)
            gathered = ltm.all_gather(x[:1]) if number % 7 == 0 else None
            found.append(x)
            if i == 0:
                assert x[0].item() == 1.0
            elif i == 1 and number % 5 == 0:
                ltm.mark_step(d)
            if gathered is not None and i == 2 and number == 35:
                assert gathered.tolist() == [1.0] * 3
        return torch.stack(found).sum().item()

    assert values(in_threads(add, 3)) == [40 * 300.0] * 3


@pytest.mark.parametrize("names", [(), ("LTC_USE_BF16",)])
def test_a_step_of_gradients_runs_without_python_between(names):
    def train(i, d):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300)).to(d)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for number in range(6):
            with metrics.counted() as grown:
                optimizer.zero_grad()
                model(torch.full((8, 64), 1.0 + i, device=d)).square().mean().backward()
                ltm.optimizer_step(optimizer)
                ltm.mark_step(d, wait=True)
        return grown["extern.python"], grown["UncachedCompile"], grown["RecordedEntries"]

    with config.override(**dict.fromkeys(names, "1")):
        assert values(in_threads(train, 2)) == [(0, 0, 0)] * 2


def test_a_program_with_more_sums_than_turns_is_cut_and_right():
    many = symmetric_memory.MOST_TURNS  # twice as many as one program may have

    def add(i, d):
        found = [
            ltm.all_reduce("sum", torch.full((2,), float(i + n), device=d)) for n in range(many)
        ]
        return [x[0].item() for x in found]

    assert values(in_threads(add, 2)) == [[2.0 * n + 1 for n in range(many)]] * 2


def test_what_has_no_room_travels_otherwise(monkeypatch):
    monkeypatch.setattr(symmetric_memory, "MOST_BYTES", 1 << 10)

    def train(i, d):
        layer = nn.Linear(50, 50, bias=False).to(d)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        optimizer = torch.optim.SGD(layer.parameters(), 1.0)
        layer(torch.full((1, 50), float(i), device=d)).sum().backward()
        ltm.optimizer_step(optimizer)
        return layer.weight[0, 0].item(), session.current().one_shot_reducer._filled

    (first, before), second = values(in_threads(train, 2))
    assert second == (first, before) and first == 0.5


def sums_with_little_shared_memory(ordinal):
    shm_segment.MOST_PART_BYTES = 4096
    return sums_of_all_types(ordinal)


def test_processes_with_little_shared_memory_sum_all_the_same():
    (expected, _) = values(in_threads(sums_of_all_types, 2))
    for found in values(in_processes(__file__, "sums_with_little_shared_memory", 2)):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("late", [0, 2])
def test_who_is_early_sleeps_until_the_others_have_come(late, monkeypatch):
    asleep, wait = set(), shared_counters.Sleeper.wait

    def counted(sleeper, address, value):
        seen = wait(sleeper, address, value)
        if seen < value:
            asleep.add(threading.get_ident())
        return seen

    def add(i, d):
        x = torch.full((3,), float(i), device=d)
        while i == late and len(asleep) < 2:
            time.sleep(0.01)
        return ltm.all_reduce("sum", x).tolist()

    monkeypatch.setattr(shared_counters.Sleeper, "wait", counted)
    assert values(in_threads(add, 3)) == [[3.0] * 3] * 3


def test_sums_of_other_types_that_nobody_reads_raise_all_the_same():
    def add(i, d):
        ltm.all_reduce("sum", torch.ones(3 + (i == 1), device=d))
        ltm.mark_step(d, wait=True)

    found = in_threads(add, 3)
    assert all(isinstance(one, PeerFailure) for one in found), found
    assert len({str(one) for one in found}) == 1
    assert "all_reduce sum of f32[4]" in str(found[0])


def test_a_failed_program_leaves_parameters_as_they_were():
    def train(i, d):
        layer = nn.Linear(4, 4).to(d)
        before = layer.weight.detach().cpu().clone()
        optimizer = torch.optim.SGD(layer.parameters(), 1.0)
        layer(torch.ones(2, 4, device=d)).sum().backward()
        if i == 0:
            ltm.optimizer_step(optimizer)
        else:
            ltm.all_gather(torch.ones(2, device=d))
        with pytest.raises(PeerFailure):
            ltm.mark_step(d, wait=True)
            ltm.wait_device_ops()
        return torch.equal(layer.weight.detach().cpu(), before)

    assert values(in_threads(train, 2)) == [True, True]


def test_the_pass_adds_the_operands_of_all_members():
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(2, 3))
    collective = Collective("all_reduce", "sum", place=0, sharers=3)
    start = make(ops.COLLECTIVE_START, x, collective=collective, count=1)
    wait = make(ops.COLLECTIVE_WAIT, start, results=(TensorType(torch.float32, (2, 3)),))
    graph = Graph((x,), (), (make(ops.GET, wait, index=0),))
    (total,) = one_shot_sums(graph).outputs
    counts = {
        op: sum(n.op is op for n in schedule(total)) for op in (ops.ADD, ops.GET, ops.TO_SYMMETRIC)
    }
    assert counts == {ops.ADD: 2, ops.GET: 3, ops.TO_SYMMETRIC: 1}
    assert [n.attr("index") for n in schedule(total) if n.op is ops.GET] == [0, 1, 2]
    left, right = total.inputs
    assert left.op is ops.ADD and right.attr("index") == 2  # ((0 + 1) + 2)


def test_the_pass_leaves_other_exchanges_alone():
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(2,))
    start = make(ops.COLLECTIVE_START, x, collective=Collective("all_reduce", "sum"), count=1)
    wait = make(ops.COLLECTIVE_WAIT, start, results=(x.type,))
    result = make(ops.GET, wait, index=0)
    assert one_shot_sums(Graph((x,), (), (result,))).outputs == (result,)
