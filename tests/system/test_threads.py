"""Threads: one device each, or all on one device, with the CPU's results."""

import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device.ops import quick_copies
from ltc.device.recording import recorder, sync
from ltc.device.recording.recorder import device_at
from ltc.runtime.executor import executor_of
from ltc.support.process.thread_frames import thread_frames

STEPS = 15


def train(index: int, device: str, batches=None, steps: int = STEPS, between=None):
    """Train a small network with writes through a view in each step; its last loss and weights."""
    generator = torch.Generator().manual_seed(100 + index)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 10))
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps):
        x, y = batches() if batches else batch(generator, device)
        optimizer.zero_grad()
        hidden = model(x) * 1
        hidden[0].mul_(2)
        loss = F.cross_entropy(hidden, y)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            ltm.mark_step(torch.device(device))
        if between:
            between(step)
    return loss.detach(), [parameter.detach() for parameter in model.parameters()]


def batch(generator: torch.Generator, device: str):
    x = torch.randn(8, 20, generator=generator, dtype=torch.double)
    return x.to(device), torch.randint(0, 10, (8,), generator=generator).to(device)


def in_threads(*calls):
    """The result of each call, all of them run at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.mark.devices(4)
def test_four_threads_train_on_four_devices(equal):
    expected = [train(index, "cpu") for index in range(4)]
    trained = in_threads(*(lambda i=i: train(i, f"ltc:{i}") for i in range(4)))
    equal(trained, expected)


class Loader:
    """Uploads batches in a thread of its own, a few ahead; called, it gives the next one."""

    def __init__(self, index: int, device: str):
        self._room, self._filled = threading.Semaphore(3), threading.Semaphore(0)
        self._batches, self._stopped = [], False
        self._generator, self._device = torch.Generator().manual_seed(500 + index), device
        self._thread = threading.Thread(target=self._fill)
        self._thread.start()

    def _fill(self):
        while self._room.acquire() and not self._stopped:
            self._batches.append(batch(self._generator, self._device))
            self._filled.release()

    def __call__(self):
        self._filled.acquire()
        self._room.release()
        return self._batches.pop(0)

    def close(self):
        self._stopped = True
        self._room.release()
        self._thread.join()


@pytest.mark.also_native
def test_two_threads_train_on_one_device_while_loaders_upload(equal, run_as):
    """Equal to the CPU, and once both are warm no step records or compiles anything new.

    With the user's settings a program may come later: it is compiled behind, one for each thread.
    """
    warm, steps = 5, 40
    barrier, grown = threading.Barrier(2), metrics.counted()

    def between(step):
        if step == warm and barrier.wait() == 0:
            ltm.wait_device_ops()
            grown.__enter__()
        if step == warm:
            barrier.wait()

    def run(index, device, between):
        loader = Loader(index, device)
        try:
            return train(index, device, loader, steps, between)
        finally:
            loader.close()

    expected = [run(index, "cpu", None) for index in range(2)]
    trained = in_threads(
        lambda: run(0, "ltc:0", between),
        lambda: run(1, "ltc:0", between),
    )
    new_entries, new_graphs = grown["RecordedEntries"], grown["UncachedCompile"]
    grown.__exit__()
    equal(trained, expected)
    assert new_entries == 0
    assert new_graphs <= (0 if run_as == "native" else 2)


def test_a_tensor_pending_in_another_thread_is_made_ready_there(equal):
    made, started, taken = [], threading.Event(), threading.Event()

    def make():
        made.append(torch.arange(6.0, device="ltc") * 2 + 1)  # pending when the thread waits
        started.set()
        taken.wait()

    thread = threading.Thread(target=make)
    thread.start()
    started.wait()
    try:
        y = made[0] + 1
        made[0].mul_(10)
        equal(y, torch.arange(6.0) * 2 + 2)
        equal(made[0], (torch.arange(6.0) * 2 + 1) * 10)
    finally:
        taken.set()
        thread.join()


def test_a_tensor_outlives_the_thread_that_recorded_it(equal):
    (x,) = in_threads(lambda: torch.arange(6.0, device="ltc").cos())
    equal(x + 1, torch.arange(6.0).cos() + 1)


def test_a_view_is_written_to_in_another_thread_than_its_base_is_used_in(equal):
    x = torch.arange(6.0, device="ltc")
    part = x[1:3]
    ltm.mark_step()
    y = x + 1
    in_threads(lambda: part.mul_(10))
    equal((x, part), (torch.tensor([0.0, 10.0, 20.0, 3.0, 4.0, 5.0]), torch.tensor([10.0, 20.0])))
    equal(y, torch.arange(6.0) + 1)


@pytest.mark.devices(4)
def test_threads_that_end_without_a_mark_leave_nothing_that_nobody_holds():
    """What a thread has recorded is kept as long as somebody can read it, and no longer."""
    device, weight = device_at(3), torch.ones(1000).to("ltc:3")
    all_are_there, kept = threading.Barrier(20), []

    def record(number: int) -> None:
        hidden = torch.ones(1000).to("ltc:3") * weight + number
        if number % 10 == 0:
            kept.append(hidden.sum())
        all_are_there.wait()  # each has a number of its own, and so a recorder

    def recorders_left() -> int:
        device._drop_recorders_of_ended_threads()  # as a new thread does
        return len(device.recorders)

    before = recorders_left()
    in_threads(*(lambda number=number: record(number) for number in range(20)))
    assert recorders_left() == before + len(kept)
    assert sorted(value.item() for value in kept) == [1000.0, 11000.0]
    kept.clear()
    assert recorders_left() == before


@pytest.mark.devices(4)
def test_two_threads_may_find_the_same_ended_thread(monkeypatch):
    device = device_at(3)
    in_threads(lambda: torch.ones(3).to("ltc:3").add(1).sum().item())

    def frames_and_another_one_drops():
        monkeypatch.undo()
        device._drop_recorders_of_ended_threads()
        return thread_frames()

    monkeypatch.setattr(recorder, "thread_frames", frames_and_another_one_drops)
    device._drop_recorders_of_ended_threads()
    assert set(device.recorders) <= set(thread_frames())


@pytest.mark.devices(4)
def test_an_executor_that_has_the_number_of_an_ended_thread_records_nothing(monkeypatch):
    device, numbers = device_at(3), []

    def record() -> None:
        torch.ones(3).to("ltc:3").add(1).sum().item()
        numbers.append(threading.get_ident())

    in_threads(record)
    (number,) = numbers
    monkeypatch.setattr(executor_of(4), "_thread", SimpleNamespace(ident=number))
    monkeypatch.setattr(recorder, "thread_frames", lambda: {threading.get_ident(), number})
    assert number in device.recorders
    device._drop_recorders_of_ended_threads()
    assert number not in device.recorders


@pytest.mark.devices(4)
@pytest.mark.parametrize("tier", ["auto", "op_by_op"])
def test_a_thread_that_gets_the_number_of_an_ended_one_meanwhile_keeps_its_recorder(
    monkeypatch, tier
):
    """It begins between two looks at the threads that run; to it the recorder is its own."""
    device, numbers = device_at(3), []

    def record() -> None:
        with config.override(LTC_TIER=tier):
            torch.ones(3).to("ltc:3").add(1)
        numbers.append(threading.get_ident())

    in_threads(record)
    (number,) = numbers
    left = device.recorders[number]
    session, others = left.immediate, set(thread_frames()) - {number}
    looks = iter([others, others | {number}])
    monkeypatch.setattr(recorder, "thread_frames", lambda: next(looks))
    device._drop_recorders_of_ended_threads()
    assert device.recorders[number] is left
    assert left.immediate is session
    assert left.thread == number
    monkeypatch.setattr(recorder, "thread_frames", lambda: others)
    device._drop_recorders_of_ended_threads()
    assert number not in device.recorders


def test_threads_that_come_and_go_read_what_is_pending():
    """Each gets the number, and the recorder, of one before while others drop recorders."""
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        for number in range(400):
            y = torch.arange(3.0 + number % 3).to("ltc") * 2 + 1
            z = y.cumsum(0)
            read = [lambda y=y: (y + 1).tolist(), lambda z=z: (z * 2).sum().item(), z.tolist]
            given = torch.arange(3.0 + number % 3) * 2 + 1
            first, total, last = in_threads(*read)
            assert first == (given + 1).tolist()
            assert total == (given.cumsum(0) * 2).sum().item()
            assert last == given.cumsum(0).tolist()
    finally:
        sys.setswitchinterval(before)


def test_many_threads_read_one_tensor():
    x = torch.arange(1000.0, device="ltc").sum()
    assert in_threads(*[x.item] * 8) == [499500.0] * 8


def test_an_error_in_a_thread_leaves_the_other_training(equal):
    def fail():
        with pytest.raises(RuntimeError):
            torch.ones(2, 3, device="ltc") @ torch.ones(2, 3, device="ltc")

    trained, _ = in_threads(lambda: train(0, "ltc:0"), lambda: [fail() for _ in range(20)])
    equal(trained, train(0, "cpu"))


def test_a_thread_reads_what_another_is_just_recording():
    """Every value read belongs to the call it was read of, wherever the reader interrupts."""
    latest, errors = [None], []

    def record():
        total = torch.zeros(4, device="ltc")
        counters = [torch.zeros(3, device="ltc") for _ in range(5)]
        for count in range(1, 1501):
            total = total + 1
            doubled = (total * 2).view(2, 2)
            doubled[0].add_(1)
            torch._foreach_add_(counters, 1.0)
            latest[0] = (count, total, doubled, counters[2].clone())
            if count % 50 == 0:
                ltm.mark_step()

    def read():
        while writer.is_alive():
            if latest[0] is None:
                continue
            count, total, doubled, counter = latest[0]
            try:
                assert total[1].item() == count
                assert doubled.tolist() == [[2 * count + 1] * 2, [2 * count] * 2]
                assert (total + counter.sum()).tolist() == [4 * count] * 4
            except BaseException as error:
                errors.append(error)
                return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # interrupts in many more places than usual
    try:
        writer = threading.Thread(target=record)
        readers = [threading.Thread(target=read) for _ in range(2)]
        for thread in (writer, *readers):
            thread.start()
        for thread in (writer, *readers):
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    assert latest[0][0] == 1500


@pytest.mark.native("it looks at the calls that are recorded")
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.double(),
        lambda x: torch.empty(3, device=x.device).zero_(),
        lambda x: torch.zeros(3, device=x.device).copy_(x),
        lambda x: torch.zeros(3, device=x.device, dtype=torch.double).copy_(x),
        lambda x: torch.zeros(2, 3, device=x.device).copy_(x),
    ],
    ids=["cast", "new memory", "copied", "copied and cast", "copied into more"],
)
def test_another_thread_ends_no_recording_while_a_copy_extends_it(call, monkeypatch):
    def look(recorder):
        looks.put(is_stopped := stop(recorder))
        return is_stopped

    def interrupted():
        if not readers and threading.get_ident() == main:
            readers.append(threading.Thread(target=pending.cpu))
            readers[0].start()
            if looks.get():
                readers[0].join()
        return threading.get_ident()

    looks, readers, main, stop = queue.SimpleQueue(), [], threading.get_ident(), sync._stop
    monkeypatch.setattr(sync, "_stop", look)
    x = torch.arange(3.0).to("ltc:0")
    for is_known in (False, False, True):
        pending = x + 1
        if is_known:
            monkeypatch.setattr(quick_copies, "get_ident", interrupted)
        found = call(pending) * 1
        ltm.mark_step()
    readers[0].join()
    assert torch.equal(found.cpu(), call(pending.cpu()))
