"""Sources of a device loader: memory that is used again, streams, iterators that are begun anew."""

import dataclasses
import itertools
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ltc.distributed.parallel_loader as pl
from ltc import config
from ltc.training_loop.batch_source import is_stream, source_of
from tests.distributed.loader_workers import need_semaphores, wait_until_no_loader_thread_runs
from tests.distributed.random_loaders import judged
from tests.drawn import seed

DEVICES = ["ltc:0", "ltc:1"]
COUNT = 20
SEED = seed("FUZZ_SEED")


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    yield
    wait_until_no_loader_thread_runs()


def values(loader) -> list[int]:
    return [int(batch) for batch in loader]


def of_devices(loader: pl.ParallelLoader, devices: list[str]) -> list:
    """The batches of a loader in the order of its source."""
    rounds = zip(*[loader.per_device_loader(device) for device in devices])
    return list(itertools.chain.from_iterable(rounds))


# --- memory that a source uses again ---------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    n: int = 0


def refilled(fill, batch):
    """COUNT times the same batch, in which something else stands each time; then nothing of it."""
    for k in range(COUNT):
        fill(k)
        yield batch
    fill(-1)


def numpy_memory():
    memory = numpy.zeros(3)
    return lambda k: memory.fill(k), [torch.from_numpy(memory)], lambda b: b[0][0]


def a_numpy_array():
    memory = numpy.zeros(3)
    return lambda k: memory.fill(k), (memory, 1), lambda b: b[0][0]


def torch_memory():
    memory = torch.zeros(3)
    return lambda k: memory.fill_(k), memory, lambda b: b[0]


def a_view():
    memory = torch.zeros(4, 4)
    return lambda k: memory.fill_(k), memory.t()[1:, ::2], lambda b: b[0, 0]


def shared_memory():
    memory = torch.zeros(3).share_memory_()
    return lambda k: memory.fill_(k), {"x": memory}, lambda b: b["x"][2]


def parts_of_a_sparse_tensor():
    memory = torch.ones(2)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 1]]), memory, (3,), is_coalesced=True, check_invariants=True
    )
    return lambda k: memory.fill_(k), sparse, lambda b: b.cpu().to_dense()[0]


def a_parameter():
    memory = torch.nn.Parameter(torch.zeros(3))
    return lambda k: memory.data.fill_(k), memory, lambda b: b[0]


def a_tensor_on_the_device():
    memory = torch.zeros(3, device="ltc:0")
    return lambda k: memory.fill_(k), memory, lambda b: b[0]


def a_view_on_the_device():
    memory = torch.zeros(3, 2, device="ltc:0")
    return lambda k: memory.fill_(k), memory[1], lambda b: b[0]


def a_list():
    batch = [torch.ones(1), 0]

    def fill(k):
        batch[0], batch[1] = torch.full((1,), float(k)), k

    return fill, batch, lambda b: b[0] if b[0] == b[1] else None


def a_dictionary_in_a_dictionary():
    inner = {"n": 0}
    return (
        lambda k: inner.update(n=k),
        {"x": torch.ones(1), "inner": inner},
        lambda b: b["inner"]["n"],
    )


def a_record():
    sample = Sample(torch.zeros(1))

    def fill(k):
        sample.n, sample.x = k, torch.full((1,), float(k))

    return fill, [sample], lambda b: b[0].n if b[0].n == b[0].x else None


def bytes_that_change():
    memory = bytearray(2)
    return lambda k: memory.__setitem__(0, k % 256), {"b": memory}, lambda b: b["b"][0]


def a_memoryview():
    memory = numpy.zeros((2, 2), numpy.int16)
    return lambda k: memory.fill(k), [memory.data], lambda b: b[0][1, 1]


def an_array_of_objects():
    memory = numpy.empty((2,), object)
    return lambda k: memory.fill(torch.full((), float(k))), memory, lambda b: b[1]


MEMORIES = [numpy_memory, a_numpy_array, torch_memory, a_view, shared_memory, parts_of_a_sparse_tensor,
            a_parameter, a_tensor_on_the_device, a_view_on_the_device, a_list,
            a_dictionary_in_a_dictionary, a_record, bytes_that_change, a_memoryview,
            an_array_of_objects]  # fmt: skip


@pytest.mark.devices(2)
@pytest.mark.parametrize("tier", ["auto", "native"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_batch_keeps_its_values_when_the_source_fills_its_memory_again(memory, devices, tier):
    if memory is parts_of_a_sparse_tensor and devices == 2:
        devices = 1  # torch's constructor of such tensors works on the first device
    with config.override(LTC_TIER=tier):
        for _ in range(3):
            fill, batch, read = memory()
            loader = pl.ParallelLoader(refilled(fill, batch), DEVICES[:devices])
            assert [int(read(b)) for b in of_devices(loader, DEVICES[:devices])] == [*range(COUNT)]
            loader.close()


@pytest.mark.devices(2)
def test_the_last_round_is_padded_with_what_was_read():
    memory = torch.zeros(2)
    source = itertools.islice(refilled(lambda k: memory.fill_(k), memory), 3)
    loader = pl.ParallelLoader(source, DEVICES, uneven="pad")
    assert [int(b[0]) for b in of_devices(loader, DEVICES)] == [0, 1, 2, 2]
    loader.close()


def test_a_batch_keeps_its_values_when_the_source_fails():
    memory = torch.zeros(2)

    def source():
        memory.fill_(1)
        yield memory
        memory.fill_(9)
        raise OSError("the file ends here")

    consumer = iter(pl.MpDeviceLoader(source(), "ltc:0"))
    assert int(next(consumer)[0]) == 1
    with pytest.raises(OSError, match="the file ends here"):
        next(consumer)


def test_what_a_consumer_writes_to_a_batch_stays_there():
    source = [torch.ones(2, device="ltc:0"), torch.ones(2)]
    for batch in pl.MpDeviceLoader(source, "ltc:0"):
        batch.add_(1)
    assert [x.tolist() for x in source] == [[1, 1], [1, 1]]


def test_a_tensor_that_is_pending_in_the_consumers_thread_arrives():
    pending = torch.ones(3, device="ltc:0") * 2
    (batch,) = pl.MpDeviceLoader([pending], "ltc:0")
    pending.add_(1)
    assert batch.tolist() == [2, 2, 2] and pending.tolist() == [3, 3, 3]


# --- streams ---------------------------------------------------------------------------------------


class Numbers:
    """An iterator of a class of one's own."""

    def __init__(self, count=1000):
        self.batches = iter(range(count))

    def __iter__(self):
        """Return itself."""
        return self

    def __next__(self):
        return torch.tensor(float(next(self.batches)))


class Restarting(Numbers):
    """The same, begun anew by each loop."""

    def __iter__(self):
        self.batches = iter(range(1000))
        return self


STREAMS = {
    "generator": lambda: (torch.tensor(float(k)) for k in range(1000)),
    "iterator of a list": lambda: iter([torch.tensor(float(k)) for k in range(1000)]),
    "map": lambda: map(torch.tensor, map(float, range(1000))),
    "class": Numbers,
    "iterator of a loader": lambda: iter(DataLoader(torch.arange(1000.0), batch_size=None)),
}


def test_streams_are_known_by_an_iter_that_does_nothing():
    assert all(is_stream(make()) for make in STREAMS.values())
    assert not any(map(is_stream, (Restarting(), [1], DataLoader([1]), range(3), "ab")))


@pytest.mark.parametrize("kind", STREAMS)
def test_a_loop_goes_on_where_the_one_before_has_left_a_stream(kind):
    loader = pl.MpDeviceLoader(STREAMS[kind](), "ltc:0")
    seen = []
    for _ in range(20):
        for batch in loader:
            seen.append(int(batch))
            if len(seen) % 7 == 0:
                break
    assert seen == [*range(140)]


@pytest.mark.devices(2)
@pytest.mark.parametrize("kind", STREAMS)
def test_two_devices_go_on_where_they_have_left_a_stream(kind):
    loader = pl.ParallelLoader(STREAMS[kind](), DEVICES)
    seen = []
    for _ in range(10):
        pairs = zip(*[loader.per_device_loader(device) for device in DEVICES])
        for number, pair in enumerate(pairs):
            seen += [int(batch) for batch in pair]
            if number == 3:
                break
        del pairs
    assert seen == [*range(80)]
    loader.close()


@pytest.mark.devices(2)
def test_loaders_made_anew_over_a_stream_lose_nothing():
    stream, seen = Numbers(), []
    for device in DEVICES * 3:
        for batch in pl.MpDeviceLoader(stream, device):
            assert str(batch.device) == device
            seen.append(int(batch))
            if len(seen) % 4 == 0:
                break
    assert seen == [*range(24)]


def test_loops_side_by_side_over_a_stream_take_turns():
    loader = pl.MpDeviceLoader(Numbers(10), "ltc:0")
    assert [(int(a), int(b)) for a, b in zip(loader, loader)] == [
        (0, 1), (2, 3), (4, 5), (6, 7), (8, 9)
    ]  # fmt: skip


@pytest.mark.devices(2)
def test_one_device_that_leaves_a_stream_leaves_its_batches_to_the_other():
    stream = Numbers(30)
    loader = pl.ParallelLoader(stream, DEVICES)
    first, second = (iter(loader.per_device_loader(device)) for device in DEVICES)
    seen = [int(next(first)), int(next(second))]
    del first
    seen += values(second)
    loader.close()
    (left,) = values(pl.MpDeviceLoader(stream, "ltc:0"))  # of a round that was not complete
    assert sorted([*seen, left]) == [*range(30)]


def test_an_error_of_a_stream_is_raised_where_the_next_loop_asks():
    def source():
        yield torch.zeros(())
        yield torch.ones(())
        raise OSError("the line is dead")

    loader = pl.MpDeviceLoader(source(), "ltc:0")
    assert int(next(iter(loader))) == 0  # by now the reader may have met the error
    time.sleep(0.2)
    consumer = iter(loader)
    assert int(next(consumer)) == 1
    with pytest.raises(OSError, match="the line is dead"):
        next(consumer)
    assert values(loader) == []


def test_a_batch_of_another_size_begins_the_next_loop_over_a_stream():
    stream = iter([torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(3)])
    loader = pl.MpDeviceLoader(stream, "ltc:0", fixed_batch_size=True)
    assert [[len(batch) for batch in loader] for _ in range(3)] == [[2, 2], [3, 3], []]


def test_an_iterator_that_begins_anew_is_read_when_it_is_asked():
    source = Restarting()
    loader = pl.MpDeviceLoader(source, "ltc:0")
    for stop in (3, 1, 5):
        for k, batch in enumerate(loader):
            assert int(batch) == k
            if k == stop:
                break
        assert int(next(source)) == stop + 1  # nothing was read ahead


def test_a_loader_over_a_list_travels_to_another_process_as_before():
    loader = pl.MpDeviceLoader([torch.ones(()), torch.zeros(())], "ltc:0")
    assert values(loader) == [1, 0]
    assert values(pickle.loads(pickle.dumps(loader))) == [1, 0]


def test_the_record_of_a_source_lives_as_long_as_the_source():
    source = Numbers()
    record = source_of(source)
    assert source_of(source) is record
    number = id(record)
    del record
    assert id(source_of(source)) == number
    assert source_of(Numbers()) is not source_of(source)


# --- one thread inside a source at a time ----------------------------------------------------------


class Watched(Dataset):
    """Says whether two threads were in it at once, or one came after the next pass had begun."""

    def __init__(self, slow: float = 0.002):
        self.inside, self.at_once, self.slow = 0, 0, slow

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.inside += 1
        self.at_once = max(self.at_once, self.inside)
        time.sleep(self.slow)
        self.inside -= 1
        return torch.tensor(float(index))


@pytest.mark.devices(2)
@pytest.mark.parametrize("devices", [1, 2])
def test_two_loops_are_never_inside_a_data_set_at_once(devices):
    samples = Watched()
    loader = pl.ParallelLoader(DataLoader(samples, batch_size=None), DEVICES[:devices])
    for _ in range(20):
        consumer = iter(loader.per_device_loader("ltc:0"))
        assert int(next(consumer)) == 0
        del consumer
    pairs = list(zip(loader.per_device_loader("ltc:0"), loader.per_device_loader("ltc:0")))
    assert all(int(a) == int(b) for a, b in pairs) and len(pairs) == 12 // devices
    assert samples.at_once == 1
    loader.close()


def test_a_pass_is_closed_before_the_next_begins():
    log = []

    class Source:
        def __iter__(self):
            log.append("open")
            try:
                for k in range(100):
                    time.sleep(0.001)
                    yield torch.tensor(float(k))
            finally:
                log.append("closed")

    loader = pl.MpDeviceLoader(Source(), "ltc:0")
    for _ in range(10):
        for _ in loader:
            break
    assert values(loader) == [*range(100)]
    assert log == ["open", "closed"] * 11


class Stored(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Counted(IterableDataset):
    def __iter__(self):
        return iter([torch.tensor(float(k)) for k in range(9)])


@pytest.mark.devices(2)
@pytest.mark.parametrize("devices", [1, 2])
def test_persistent_workers_serve_loops_that_are_left_anywhere(devices):
    need_semaphores()
    draw = random.Random(SEED)
    workers = DataLoader(Stored(), batch_size=None, num_workers=2, persistent_workers=True)
    loader = pl.ParallelLoader(workers, DEVICES[:devices])
    for _ in range(100):
        stop, seen = draw.randrange(18 // devices), []
        rounds = zip(*[loader.per_device_loader(device) for device in DEVICES[:devices]])
        for number, batches in enumerate(rounds):
            seen += [int(batch) for batch in batches]
            if number == stop:
                break
        del rounds
        assert seen == [*range(min((stop + 1) * devices, 16))], f"FUZZ_SEED={SEED}"
    loader.close()


def test_persistent_workers_serve_loaders_made_anew():
    need_semaphores()
    workers = DataLoader(Counted(), batch_size=None, num_workers=1, persistent_workers=True)
    for stop in (0, 3, 1, 8, 20):
        seen = []
        for batch in pl.MpDeviceLoader(workers, "ltc:0"):
            seen.append(int(batch))
            if len(seen) == stop + 1:
                break
        assert seen == [*range(min(stop + 1, 9))]


def test_loops_side_by_side_over_persistent_workers_are_those_of_pytorch():
    need_semaphores()

    def made():
        return DataLoader(Stored(), batch_size=None, num_workers=2, persistent_workers=True)

    alone, loader = made(), pl.MpDeviceLoader(made(), "ltc:0")
    for _ in range(2):
        expected = [(int(a), int(b)) for a, b in zip(alone, alone)]
        assert [(int(a), int(b)) for a, b in zip(loader, loader)] == expected


def test_an_outer_loop_outlives_thousands_of_inner_ones():
    class Loader:
        """Begins its one iterator anew for each loop."""

        def __init__(self):
            self.numbers = Restarting()

        def __iter__(self):
            return iter(self.numbers)

    loader = pl.MpDeviceLoader(Loader(), "ltc:0")
    outer = iter(loader)
    assert int(next(outer)) == 0
    for _ in range(1500):
        assert int(next(iter(loader))) == 0
    assert int(next(outer)) == 1


@pytest.mark.devices(2)
def test_loops_for_other_devices_over_persistent_workers_say_so():
    need_semaphores()
    workers = DataLoader(Counted(), batch_size=None, num_workers=1, persistent_workers=True)
    options = {"loader_prefetch_size": 1, "device_prefetch_size": 1}  # it is not read to its end
    first = iter(pl.MpDeviceLoader(workers, "ltc:0", **options))
    assert int(next(first)) == 0
    assert values(pl.MpDeviceLoader(workers, "ltc:1", **options)) == [*range(9)]
    with pytest.raises(RuntimeError, match="than ltc:0, has begun it anew"):
        next(first)


@pytest.mark.devices(2)
def test_a_device_that_is_behind_gets_the_rest_of_its_epoch():
    need_semaphores()
    workers = DataLoader(Stored(), batch_size=None, num_workers=2, persistent_workers=True)
    loader = pl.ParallelLoader(workers, DEVICES)
    first, second = (loader.per_device_loader(device) for device in DEVICES)
    for _ in range(3):
        behind = iter(second)
        assert values(first) == [*range(0, 16, 2)]
        ahead = iter(first)
        assert int(next(ahead)) == 0
        assert values(behind) == [*range(1, 16, 2)]
        assert values(ahead) == [*range(2, 16, 2)] and values(second) == [*range(1, 16, 2)]
    loader.close()


def test_a_loop_in_another_thread_may_leave_while_this_one_goes_on():
    samples = Watched(0)
    loader = pl.MpDeviceLoader(DataLoader(samples, batch_size=None), "ltc:0")

    def work():
        for _ in range(10):
            for batch in loader:
                if int(batch) == 5:
                    break

    thread = threading.Thread(target=work)
    thread.start()
    seen = [values(loader) for _ in range(10)]
    thread.join()
    assert seen == [[*range(12)]] * 10 and samples.at_once == 1


# --- processes -------------------------------------------------------------------------------------

HEAD = """
import os, signal, threading, time
import torch
import ltc
import ltc.distributed.parallel_loader as pl
"""
PROGRAMS = {
    "ends while the reader waits": """
        def source():
            yield torch.ones(2)
            time.sleep(1000)
            yield torch.ones(2)
        batches = iter(pl.MpDeviceLoader(source(), "ltc"))
        print(next(batches).tolist())
    """,
    "ends in the middle of persistent workers": """
        if __name__ == "__main__":
            data = torch.utils.data.DataLoader(
                torch.arange(1000.0), num_workers=2, persistent_workers=True,
                multiprocessing_context="fork")
            for batch in pl.MpDeviceLoader(data, "ltc"):
                break
            print([1.0, 1.0])
    """,
    "is interrupted": """
        def source():
            while True:
                time.sleep(0.01)
                yield torch.ones(2)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        loader = pl.MpDeviceLoader(source(), "ltc")
        try:
            for batch in loader:
                pass
        except KeyboardInterrupt:
            print(next(iter(loader)).tolist())
    """,
    "forks": """
        loader = pl.MpDeviceLoader((torch.ones(2) for _ in range(100)), "ltc")
        again = pl.MpDeviceLoader([torch.ones(2)] * 3, "ltc")
        batches, others = iter(loader), iter(again)
        next(batches), next(others)
        time.sleep(0.3)  # now the reader waits for room
        child = os.fork()
        if child == 0:
            try:
                next(others)
            except RuntimeError as error:
                assert "before the process was forked" in str(error)
            assert len(list(again)) == 3
            del batches, others
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(next(batches).tolist())
    """,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_process_hangs_that(program, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(HEAD + textwrap.dedent(PROGRAMS[program]))
    if "workers" in program:
        need_semaphores()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env=dict(os.environ),
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[1.0, 1.0]"), done.stderr


# --- at random -------------------------------------------------------------------------------------


@pytest.mark.devices(2)
@pytest.mark.parametrize("number", range(30))
def test_loaders_at_random_give_what_their_source_gives(number):
    """More of them: `python scripts/compare/random_loaders.py`."""
    if number < 3:
        need_semaphores()
    wrong = judged(SEED * 30 + number, "persistent workers" if number < 3 else None)
    assert not wrong, f"FUZZ_SEED={SEED}, program {SEED * 30 + number}: {wrong}"
