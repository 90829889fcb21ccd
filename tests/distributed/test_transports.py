"""Processes of one host: the same results as threads, bit for bit, and every way a peer can go."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ltc  # noqa: F401
import ltc.core.lazy_model as ltm
from ltc.distributed import collectives, world
from ltc.distributed.transport import bootstrap, inter_host, status_board
from ltc.distributed.transport.call_log import MAX_CALLS, SharedMemoryCallLog, StoreCallLog
from ltc.distributed.transport.communicator import Communicator
from ltc.distributed.transport.folds import OPERATIONS
from ltc.distributed.transport.session import ThreadsWire
from ltc.distributed.transport.shm_segment import SLOTS, Region, region_bytes
from ltc.distributed.transport.wire import Mismatch, SharedMemoryWire
from ltc.errors import PeerFailure
from ltc.ir.collective import Collective
from tests import marks

sys.path.insert(0, str(Path(__file__).parent))

from replicas import (
    LIMIT_SECONDS,
    in_processes,
    in_threads,
    values,
    whole_tables,
)

pytestmark = pytest.mark.devices(4)

SIZES = (1, 1_000, 300_001, 3_000_000)


def draw(ordinal: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(ordinal))


def sums(ordinal: int, device: str = "ltc:0") -> list:
    """What is reduced from each size, twice."""
    return [
        ltm.all_reduce("sum", draw(ordinal, n).to(device)).cpu() for n in SIZES for _ in range(2)
    ]


def test_processes_and_threads_give_the_same_bits():
    of_processes = values(in_processes(__file__, "sums", 3))
    of_threads = values(in_threads(sums, 3))
    for one in [*of_processes, *of_threads]:
        assert all(torch.equal(a, b) for a, b in zip(one, of_threads[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(of_threads[0][::2], of_threads[0][1::2]))


HOSTS = [
    ({"LTC_TRANSPORT": "hosts"}, 2),  # every process as if on a host of its own
    ({"LOCAL_WORLD_SIZE": "2"}, 4),  # two processes on each of two hosts
]


@pytest.mark.parametrize("environment, processes", HOSTS)
def test_hosts_exchange_over_tcp(environment, processes):
    found = values(in_processes(__file__, "sums", processes, **environment))
    for position, elements in enumerate(n for n in SIZES for _ in range(2)):
        expected = sum(draw(i, elements) for i in range(processes))
        for one in found:
            assert torch.equal(one[position], found[0][position])
            # a ring begins each sum elsewhere: some units in the last place of a number below 8
            torch.testing.assert_close(one[position], expected, rtol=0, atol=4e-6)
    assert all(torch.equal(a, b) for a, b in zip(found[0][::2], found[0][1::2]))


REDUCED = [(kind, dtype) for kind in ("sum", "max", "min", "mul") for dtype in (
    torch.float32, torch.bfloat16, torch.float64, torch.int64,
)]  # fmt: skip


def operand(ordinal: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, and NaN where the dtype has it: every order of sums is exact."""
    x = torch.randint(-3, 4, (100_000,), generator=torch.Generator().manual_seed(ordinal))
    x = x.to(dtype)
    if dtype.is_floating_point:
        x[ordinal] = float("nan")
    return x


def of_each_reduction(ordinal: int) -> list:
    return [ltm.all_reduce(kind, operand(ordinal, d).to("ltc")).cpu() for kind, d in REDUCED]


@pytest.mark.parametrize("environment", [{"LTC_TRANSPORT": "hosts"}, {"LOCAL_WORLD_SIZE": "1"}])
def test_a_ring_reduces_as_torch_does(environment):
    found = values(in_processes(__file__, "of_each_reduction", 3, **environment))
    for position, (kind, dtype) in enumerate(REDUCED):
        first, *others = (operand(ordinal, dtype) for ordinal in range(3))
        for x in others:
            first = OPERATIONS[kind](first, x)
        for one in found:
            torch.testing.assert_close(one[position], first, rtol=0, atol=0, equal_nan=True)


def every_kind(ordinal: int) -> list:
    x = torch.arange(8.0, device="ltc").view(4, 2) + 100 * ordinal
    y = torch.full((2,), float("nan") if ordinal else 7.0, device="ltc")
    ltm.collective_broadcast([y])
    results = [
        ltm.all_gather(x),
        ltm.reduce_scatter("sum", x, 1.0, 0, 4),
        ltm.all_to_all(x, 0, 1, 4),
        ltm.collective_permute(x, [[i, (i + 1) % 4] for i in range(4)]),
        y,
        ltm.all_reduce("max", x, groups=[[0, 3], [1, 2]]),
    ]
    return [
        *[r.cpu() for r in results],
        ltm.rendezvous("r", b"%d" % ordinal, [0, 3] if ordinal in (0, 3) else [1, 2]),
    ]


def test_every_kind_is_the_same_over_hosts_as_in_memory():
    over_hosts = values(in_processes(__file__, "every_kind", 4, LOCAL_WORLD_SIZE="2"))
    in_memory = values(in_processes(__file__, "every_kind", 4))
    for one, other in zip(over_hosts, in_memory, strict=True):
        assert one[-1] == other[-1]
        assert all(torch.equal(a, b) for a, b in zip(one[:-1], other[:-1]))


def disagree(ordinal: int) -> None:
    status_board._ANSWER_SECONDS = LIMIT_SECONDS
    ltm.rendezvous("all are here")
    with whole_tables():
        ltm.all_reduce("sum", torch.ones(2 + (ordinal == 3), device="ltc")).cpu()


@pytest.mark.parametrize("environment", [{}, {"LOCAL_WORLD_SIZE": "2"}])
def test_a_mismatch_between_processes_raises_one_table(environment):
    found = in_processes(__file__, "disagree", 4, **environment)
    assert len({str(one) for one in found}) == 1, found
    assert str(found[0]).startswith("PeerFailure: Replicas do not run the same collectives")
    assert str(found[0]).count("test_transports.py") == 4


def place(ordinal: int) -> tuple:
    payloads = ltm.rendezvous("place", str(ordinal).encode())
    return ltm.get_ordinal(), ltm.xrt_world_size(), payloads


def test_a_process_is_a_replica():
    assert values(in_processes(__file__, "place")) == [(i, 2, [b"0", b"1"]) for i in range(2)]


def of_each_thread(ordinal: int) -> list:
    def total(thread, device):
        x = torch.full((3,), float(world.ordinal()), device=device)
        return ltm.get_ordinal(), ltm.xrt_world_size(), ltm.all_reduce("sum", x).tolist()

    with marks.devices(2):
        return values(in_threads(total, 2))


def test_threads_of_several_processes_are_all_replicas_of_one_run():
    found = values(in_processes(__file__, "of_each_thread"))
    assert found == [[(2 * p + t, 4, [6.0] * 3) for t in range(2)] for p in range(2)]


def die_in_a_collective(ordinal: int) -> str:
    ltm.rendezvous("all are here")
    if ordinal == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ltm.all_reduce("sum", torch.ones(100_000, device="ltc")).cpu()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("environment", [{}, {"LTC_TRANSPORT": "hosts"}])
def test_a_killed_process_is_noticed_without_the_time_limit(environment):
    found = in_processes(
        __file__, "die_in_a_collective", 3, LTC_PEER_TIMEOUT="86400", **environment
    )
    assert found[1] == -signal.SIGKILL
    assert found[0] == found[2]
    assert re.match(r"Replica 1 (\(process \d+\) )?is gone", found[0]), found[0]


class Clock:
    """Stands still until the first two of three have come to where the hosts connect."""

    now, sleep = 0, staticmethod(time.sleep)

    def __init__(self) -> None:
        self.store = dist.PrefixStore("programs-3", bootstrap.store(3))

    def monotonic(self) -> float:
        self.now += self.store.check(["here/0", "here/1"])
        return self.now


def come_unless_last(ordinal: int) -> str:
    if ordinal == 2:
        return "did not come"
    inter_host.time = Clock()
    try:
        ltm.rendezvous("all")
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_host_that_does_not_come_is_named():
    *found, _ = in_processes(
        __file__, "come_unless_last", 3, LTC_TRANSPORT="hosts", LTC_PEER_TIMEOUT="2"
    )
    for ordinal, text in enumerate(found):
        assert (
            "Replica(s) 2 (host 2) of 3 did not reach the meeting point of the hosts within 2 s"
            in text
        )
        assert f"Replica {ordinal}, on" in text


def of_each_type(ordinal: int) -> list:
    """Of sizes that leave at once, and that do not."""
    dtypes = [torch.complex128, torch.bool, torch.bfloat16, torch.int8, torch.float64]
    operands = [torch.ones(n, dtype=d) for d in dtypes for n in (1, 7, 10_001, 90_001)]
    gather = Collective("all_gather")
    return [collectives.host_run(gather, [x])[0].sum().item() for x in operands]


def test_every_type_goes_between_hosts_in_every_size():
    of_one = [2 * n for _ in range(5) for n in (1, 7, 10_001, 90_001)]
    of_one[8:12] = [torch.ones(2 * n, dtype=torch.bfloat16).sum() for n in (1, 7, 10_001, 90_001)]
    assert values(in_processes(__file__, "of_each_type", 2, LTC_TRANSPORT="hosts")) == [of_one] * 2


def leave_after_sending(ordinal: int) -> str:
    """The first one ends at once, the other receives late: large and small."""
    ltm.rendezvous("all are here")
    large = torch.full((400_000,), 3.0, device="ltc")
    if ordinal == 0:
        ltm.send(large, 0, target=1)
        ltm.send(large[:2] + 1, 0, target=1)
        return "sent"
    time.sleep(1)
    first = ltm.recv(torch.zeros(400_000, device="ltc"), 0, source=0)
    second = ltm.recv(torch.zeros(2, device="ltc"), 0, source=0)
    return f"{first.unique().tolist()} {second.tolist()}"


def test_what_a_process_has_sent_to_another_host_does_not_go_with_it():
    found = in_processes(__file__, "leave_after_sending", 2, LTC_TRANSPORT="hosts")
    assert found == ["sent", "[3.0] [4.0, 4.0]"]


def send_first(ordinal: int) -> str:
    ltm.all_reduce("sum", torch.ones(2, device="ltc")).cpu()  # the hosts have connected
    try:
        found = []
        for elements in (2, 2_000_000):  # more than a connection holds
            ltm.send(torch.ones(elements, device="ltc"), 0, target=1 - ordinal)
            zeros = torch.zeros(elements, device="ltc")
            found.append(ltm.recv(zeros, 0, source=1 - ordinal).unique().tolist())
        return str(found)
    except RuntimeError as error:
        return str(error)


def test_hosts_may_both_send_first():
    found = in_processes(__file__, "send_first", 2, LTC_TRANSPORT="hosts")
    assert found == ["[[1.0], [1.0]]"] * 2


def leave_without_reading(ordinal: int) -> float:
    total = ltm.all_reduce("sum", torch.ones(2, device="ltc"))
    return None if ordinal else total.tolist()


def test_a_process_that_ends_runs_what_it_recorded_and_never_read():
    assert in_processes(__file__, "leave_without_reading") == [[2.0, 2.0], None]


def at_once(ordinal: int) -> tuple:
    x = torch.full((2_000_000,), ordinal + 1.0)
    collectives.host_all_reduce(x)
    y = torch.tensor([ordinal + 1])
    collectives.host_all_reduce(y, "max")
    return x.unique().tolist(), y.tolist()


def test_host_level_reductions_of_processes():
    assert values(in_processes(__file__, "at_once")) == [([3.0], [2])] * 2


# --- the wire itself --------------------------------------------------------------------------


def test_a_mailbox_holds_some_messages_and_keeps_their_order():
    region = Region.of_threads(2)
    here, there = SharedMemoryWire(region, 0), SharedMemoryWire(region, 1)
    for number in range(SLOTS):
        here.send(1, torch.full((3,), number), 7)
    got = torch.empty(3, dtype=torch.int64)
    for number in range(SLOTS):
        assert there.take(0, got, 7).tolist() == [number] * 3
        there.give_back(0)


@pytest.mark.parametrize("wire", [SharedMemoryWire, ThreadsWire])
@pytest.mark.parametrize("word, size", [(8, 3), (7, 4)])
def test_a_message_with_another_word_or_size_is_a_mismatch(wire, word, size):
    region = Region.of_threads(2)
    wire(region, 0).send(1, torch.zeros(3), 7)
    with pytest.raises(Mismatch):
        wire(region, 1).take(0, torch.empty(size), word)


def test_threads_read_each_others_memory_and_wait_until_it_was_read():
    region = Region.of_threads(2)
    here, there = ThreadsWire(region, 0), ThreadsWire(region, 1)
    large, small, taken, found = torch.ones(1 << 20), torch.ones(8), [], []
    here.send(1, small, 7)
    here.finish()  # was copied
    here.send(1, large, 7)
    sender = threading.Thread(target=lambda: (here.finish(), found.append(len(taken))))
    sender.start()
    for like in (small, large):
        taken.append(there.take(0, like, 7).data_ptr())
        there.give_back(0)
    sender.join()
    assert taken[0] != small.data_ptr() and taken[1] == large.data_ptr()
    assert found == [2]


def test_a_region_takes_memory_only_for_what_is_used():
    assert region_bytes(2) < 16 << 20
    assert region_bytes(64) < 512 << 20


def test_a_wait_that_is_over_is_part_of_no_deadlock():
    region = Region.of_threads(2)
    counter = region.mailbox(1, 0)
    region.say_waiting(0, 1, counter, 1)
    assert region.waits_for(0) == 1
    region.store(counter, 1)  # replica 0 has had no processor since
    assert region.waits_for(0) is None


def test_an_abort_report_comes_before_the_transports_own_error():
    region = Region.of_threads(2)
    here = status_board.StatusBoard(region, 0)
    here.ask = lambda: region.fail("the abort report of another host")

    def exchange(*arguments):
        raise RuntimeError("Connection closed by peer")

    communicator = Communicator(ThreadsWire(region, 0), here)
    with pytest.raises(PeerFailure, match="the abort report of another host"):
        communicator.guarded((0, 1), (b"an exchange", 7), exchange)


def test_an_exchange_may_be_posted_by_one_member_and_run_by_the_other():
    """Each chooses for itself: it posts one while its thread for exchanges has nothing to do."""
    region = Region.of_threads(2)
    total, found = Collective("all_reduce", "sum"), [[], []]

    def exchange(ordinal: int) -> None:
        board = status_board.StatusBoard(region, ordinal)
        communicator = Communicator(ThreadsWire(region, ordinal), board)
        for number in range(6):
            operand = torch.full((3,), float(number + ordinal))
            if (number + ordinal) % 2 or number == 4:
                made = communicator.run(total, [operand])
            else:
                made = communicator.post(total, [operand])()
            found[ordinal].append(made[0].tolist())

    threads = [threading.Thread(target=exchange, args=(ordinal,)) for ordinal in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[[2.0 * number + 1] * 3 for number in range(6)]] * 2


def test_the_first_abort_report_counts():
    region = Region.of_threads(2)
    region.fail("first")
    region.fail("second")
    with pytest.raises(RuntimeError, match="^first$"):
        region.raise_abort_report()


# --- the log of calls -------------------------------------------------------------------------


@pytest.fixture(params=["memory", "store"])
def logs(request, tmp_path):
    """Those of the two members of a group."""
    if request.param == "memory":
        return [SharedMemoryCallLog(str(tmp_path / "calls"), member, 2) for member in range(2)]
    store = dist.HashStore()
    return [StoreCallLog(store, member, 2) for member in range(2)]


def test_the_later_of_two_calls_that_differ_is_told(logs):
    for number in range(1, 2 * MAX_CALLS):
        for log in logs[:: 1 if number % 2 else -1]:
            log.compare(0, number, 7 * number)
    logs[1].compare(0, 2 * MAX_CALLS, 1)
    with pytest.raises(Mismatch) as caught:
        logs[0].compare(0, 2 * MAX_CALLS, 2)
    assert caught.value.peer == 1


def test_lanes_of_the_log_are_apart(logs):
    logs[0].compare(1, 1, 5)
    logs[1].compare(2, 1, 6)
    with pytest.raises(Mismatch):
        logs[1].compare(1, 1, 6)


def test_a_member_may_be_further_ahead_than_the_log_reaches(logs):
    for number in range(1, MAX_CALLS + 9):
        logs[0].compare(0, number, number)
    logs[1].compare(0, 1, 1)
    with pytest.raises(Mismatch):
        logs[1].compare(0, 20, 21)


def test_who_has_not_come_to_a_call_is_told(logs):
    logs[0].compare(0, 1, 7)
    assert logs[0].absent(1) == [1]
    logs[1].compare(0, 1, 7)
    assert logs[1].absent(1) in ([], [0])
    assert logs[0].absent(1) == logs[1].absent(1) == []
