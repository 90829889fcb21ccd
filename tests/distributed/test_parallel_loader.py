"""Device loaders: what arrives where and when, and that nothing hangs, is lost, or stays behind."""

import logging
import threading
import time
import traceback

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ltc.core.lazy_model as ltm
import ltc.distributed.parallel_loader as pl
from ltc.debug import metrics, profiler
from ltc.device.recording.tensors import state_of
from ltc.distributed import loader_epoch
from ltc.distributed.data_parallel import DataParallel
from tests.distributed.loader_workers import (
    HANG_SECONDS,
    loader_threads,
    need_semaphores,
    wait_until_no_loader_thread_runs,
)

pytestmark = pytest.mark.devices(2)

DEVICES = ["ltc:0", "ltc:1"]


def numbered(count: int) -> list[torch.Tensor]:
    return [torch.tensor(float(i)) for i in range(count)]


def values(loader) -> list[int]:
    return [int(batch) for batch in loader]


def both(loader: pl.ParallelLoader) -> list[list[int]]:
    """The batches of both devices, consumed in turns as two threads would."""
    consumers = [iter(loader.per_device_loader(device)) for device in DEVICES]
    rounds = list(zip(*consumers))
    return [[int(batch) for batch in column] for column in zip(*rounds)]


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    yield
    wait_until_no_loader_thread_runs()


class Samples(Dataset):
    """Nine numbers, one of which may raise."""

    def __init__(self, bad: int | None = None):
        self.bad = bad

    def __len__(self):
        return 9

    def __getitem__(self, index):
        if index == self.bad:
            raise KeyError("sample", index)
        return torch.tensor(float(index))


# --- what arrives -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_every_tensor_arrives_on_the_device_and_tuples_become_lists(device):
    batch = {"images": (torch.ones(2), torch.zeros(3)), "names": ["a", 1], "labels": torch.ones(1)}
    (arrived,) = pl.MpDeviceLoader([batch], device)
    assert arrived["names"] == ["a", 1] and type(arrived["images"]) is list
    tensors = [*arrived["images"], arrived["labels"]]
    assert {str(tensor.device) for tensor in tensors} == {device}


def test_a_device_loader_yields_pairs_of_data_and_target():
    source = [(torch.ones(2, 3), torch.zeros(2))] * 3
    loader = pl.ParallelLoader(source, ["ltc:0"])
    for data, target in loader.per_device_loader("ltc:0"):
        assert data.shape == (2, 3) and target.shape == (2,)


def test_a_batch_has_arrived_before_it_is_asked_for():
    (batch,) = pl.MpDeviceLoader(numbered(1), "ltc:0")
    assert state_of(batch).buffer is not None


def test_batch_i_goes_to_device_i_modulo_their_number_and_an_incomplete_round_is_dropped():
    loader = pl.ParallelLoader(numbered(7), DEVICES)
    assert both(loader) == [[0, 2, 4], [1, 3, 5]]
    assert [len(loader.per_device_loader(device)) for device in DEVICES] == [3, 3]
    loader.close()


def test_uneven_pad_deals_the_last_batches_again():
    loader = pl.ParallelLoader(numbered(7), DEVICES, uneven="pad")
    assert both(loader) == [[0, 2, 4, 6], [1, 3, 5, 6]]
    assert loader.per_device_samples() == 4


@pytest.mark.parametrize("source", [numbered(7), iter(numbered(7))], ids=["list", "iterator"])
def test_uneven_error_says_how_many_batches_are_left_over(source):
    loader = pl.ParallelLoader(source, DEVICES, uneven="error")
    with pytest.raises(ValueError, match="7 batches: 1 would reach no device"):
        both(loader)
    loader.close()


def test_a_batch_of_another_size_ends_a_loader_of_fixed_size():
    source = [torch.ones(2, 4), torch.ones(3, 4), torch.ones(3, 5), torch.ones(3, 4)]
    assert len(list(pl.MpDeviceLoader(source, "ltc:0", fixed_batch_size=True))) == 1
    source = source[1:]
    assert len(list(pl.MpDeviceLoader(source, "ltc:0", fixed_batch_size=True))) == 3
    assert len(list(pl.MpDeviceLoader(source, "ltc:0", fixed_batch_size=True, batchdim=1))) == 1


def test_the_length_is_that_of_the_loader():
    assert len(pl.MpDeviceLoader(DataLoader(Samples(), batch_size=2), "ltc:0")) == 5


# --- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches, per_execution, marks", [(5, 1, 7), (8, 4, 3), (0, 1, 2)])
def test_a_step_ends_every_so_many_batches_and_at_the_end(batches, per_execution, marks):
    loader = pl.MpDeviceLoader(numbered(batches), "ltc:0", batches_per_execution=per_execution)
    with metrics.counted() as grown:
        assert len(list(loader)) == batches
    assert grown["MarkStep"] == marks


def test_a_step_ends_before_the_next_batch_is_fetched():
    consumer = iter(pl.MpDeviceLoader(numbered(3), "ltc:1"))
    doubled = next(consumer) * 2
    assert state_of(doubled).buffer is None
    next(consumer)
    assert state_of(doubled).buffer is not None


def test_inside_a_step_trace_no_step_is_ended():
    consumer = iter(pl.MpDeviceLoader(numbered(3), "ltc:0"))
    with metrics.counted() as grown:
        with profiler.StepTrace("train"):
            next(consumer)
    assert grown["MarkStep"] == 1  # the trace's own


def test_batches_per_execution_can_be_asked_for():
    assert pl.ParallelLoader([], ["ltc:0"], batches_per_execution=3).batches_per_execution == 3


# --- epochs -------------------------------------------------------------------------------------


def test_every_device_goes_through_several_epochs():
    loader = pl.ParallelLoader(numbered(4), DEVICES)
    assert [both(loader) for _ in range(3)] == [[[0, 2], [1, 3]]] * 3
    loader.close()


def test_epochs_draw_the_order_a_plain_loader_draws():
    def orders(wrap):
        torch.manual_seed(3)
        loader = wrap(DataLoader(Samples(), batch_size=None, shuffle=True))
        orders = []
        for _ in range(3):
            consumer = iter(loader)
            first = [int(next(consumer))]
            torch.rand(5)  # what the training draws meanwhile
            orders.append(first + values(consumer))
        return orders

    on_device = orders(lambda loader: pl.MpDeviceLoader(loader, "ltc:0"))
    assert on_device == orders(lambda loader: loader)


def test_next_keeps_raising_stop_iteration_after_the_last_batch():
    consumer = pl.ParallelLoader(numbered(2), ["ltc:0"]).per_device_loader("ltc:0")
    assert [int(next(consumer)), int(consumer.next())] == [0, 1]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(consumer)
    assert values(consumer) == [0, 1]  # iterating begins anew


def test_a_loop_goes_on_where_next_has_stopped():
    consumer = pl.ParallelLoader(numbered(4), ["ltc:0"]).per_device_loader("ltc:0")
    assert int(next(consumer)) == 0
    assert values(consumer) == [1, 2, 3]


def test_next_item_gives_the_batches_of_a_device_and_refuses_another():
    loader = pl.ParallelLoader(numbered(2), ["ltc:0"])
    with metrics.counted() as grown:
        assert [int(loader.next_item("ltc:0")), int(loader.next_item("ltc:0"))] == [0, 1]
    assert grown["MarkStep"] == 0
    with pytest.raises(KeyError, match="ltc:1"):
        loader.next_item("ltc:1")
    with pytest.raises(KeyError, match="ltc:1"):
        loader.per_device_loader("ltc:1")


def test_a_device_that_never_consumes_does_not_hold_up_the_other():
    source = numbered(4)  # fits into the queues of the device that never consumes
    loader = pl.ParallelLoader(source, DEVICES)
    for _ in range(5):
        assert values(loader.per_device_loader("ltc:0")) == [0, 2]
    while len(loader_threads()) > 3 * 3:  # what was read ends when it has the processor
        time.sleep(0.01)
    loader.close()


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_loops_left_early_leave_no_thread(workers):
    if workers:
        need_semaphores()
    loader = pl.MpDeviceLoader(DataLoader(Samples(), num_workers=workers), "ltc:0")
    for _ in range(50 if workers == 0 else 3):
        for _ in loader:
            break
    wait_until_no_loader_thread_runs()
    assert len(values(loader)) == 9


def test_loops_of_two_devices_left_early_leave_no_thread():
    loader = pl.ParallelLoader(numbered(100), DEVICES)
    for _ in range(50):
        consumers = [iter(loader.per_device_loader(device)) for device in DEVICES]
        assert [int(next(consumer)) for consumer in consumers] == [0, 1]
    del consumers
    wait_until_no_loader_thread_runs()


def test_dropping_a_loader_ends_its_threads():
    loader = pl.ParallelLoader(numbered(100), DEVICES)
    next(loader.per_device_loader("ltc:0"))
    del loader
    wait_until_no_loader_thread_runs()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [0, 4, 8])
def test_the_error_of_a_sample_is_raised_in_the_consumer_as_itself(bad, workers, devices):
    if workers:
        need_semaphores()
    source = DataLoader(Samples(bad), batch_size=None, num_workers=workers)
    loader = pl.ParallelLoader(source, DEVICES[:devices])
    with pytest.raises(KeyError) as caught:
        list(loader.per_device_loader("ltc:0"))
    shown = "".join(traceback.format_exception(caught.value))
    assert "__getitem__" in shown and 'KeyError("sample", index)' in shown
    loader.close()


def test_batches_before_the_error_arrive():
    consumer = iter(pl.MpDeviceLoader(DataLoader(Samples(4), batch_size=None), "ltc:0"))
    assert [int(next(consumer)) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        next(consumer)


def fail_to_collate(samples):
    raise ZeroDivisionError(f"{len(samples)} samples")


def test_the_error_of_the_collation_is_raised_as_itself():
    loader = DataLoader(Samples(), batch_size=3, collate_fn=fail_to_collate)
    with pytest.raises(ZeroDivisionError, match="3 samples"):
        list(pl.MpDeviceLoader(loader, "ltc:0"))


def test_the_error_of_an_upload_is_raised_as_itself(monkeypatch):
    def refuse(batch, device):
        raise MemoryError(f"no room on {device}")

    monkeypatch.setattr(loader_epoch, "batch_on_device", refuse)
    with pytest.raises(MemoryError, match="no room on ltc:0"):
        list(pl.MpDeviceLoader(numbered(20), "ltc:0"))


def test_a_stalled_consumer_bounds_what_is_read():
    read = []

    def source():
        for i in range(1000):
            read.append(i)
            yield torch.tensor(float(i))

    consumer = iter(
        pl.MpDeviceLoader(source(), "ltc:0", loader_prefetch_size=3, device_prefetch_size=2)
    )
    next(consumer)
    before = -1
    while len(read) != before:  # until the reader has stood still for a while
        before = len(read)
        time.sleep(0.2)
    assert before <= 1 + 3 + 2 * 2 + 1


class Released(threading.Event):
    """Knows that somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.is_awaited = threading.Event()

    def wait(self):
        self.is_awaited.set()
        super().wait()


def test_a_stall_logs_every_loader_threads_stack_once(monkeypatch, caplog):
    monkeypatch.setattr(loader_epoch, "STALL_SECONDS", HANG_SECONDS)
    released = Released()

    def source():
        yield torch.zeros(())
        released.wait()
        yield torch.ones(())

    def release():
        while not caplog.records:
            time.sleep(0.01)
        time.sleep(0.2)  # several more limits pass
        released.set()

    with caplog.at_level(logging.WARNING):
        helper = threading.Thread(target=release)
        helper.start()
        consumer = iter(pl.MpDeviceLoader(source(), "ltc:0"))
        assert int(next(consumer)) == 0
        released.is_awaited.wait()
        monkeypatch.setattr(loader_epoch, "STALL_SECONDS", 0.05)
        assert values(consumer) == [1]
        helper.join()
    (record,) = caplog.records
    text = record.getMessage()
    assert "released.wait()" in text and "ltc loader: reader" in text


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="at least one device"):
        pl.ParallelLoader([], [])
    with pytest.raises(ValueError, match="uneven='join'"):
        pl.ParallelLoader([], ["ltc:0"], uneven="join")
    for name in ("batches_per_execution", "loader_prefetch_size", "device_prefetch_size"):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            pl.MpDeviceLoader([], "ltc:0", **{name: 0}).__iter__()


NUMBERS = ("batches_per_execution", "loader_prefetch_size", "device_prefetch_size", "batchdim")


@pytest.mark.parametrize(
    "number", [1.5, 2.0, float("nan"), True, "2", None, [1], torch.tensor(1.5)]
)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_no_integer_is_refused_where_the_loader_is_made(name, number):
    text = rf"{name}=.* is a {type(number).__name__}: pass .*, an integer"
    with pytest.raises(TypeError, match=text):
        pl.MpDeviceLoader([], "ltc:0", **{name: number})
    with pytest.raises(TypeError, match=text):
        pl.ParallelLoader([], ["ltc:0"], **{name: number})
    with pytest.raises(TypeError, match=text):
        DataParallel(torch.nn.Linear(1, 1), ["ltc:0"], **{name: number})


@pytest.mark.parametrize("number", [0, -1, numpy.int64(0)])
@pytest.mark.parametrize("name", NUMBERS[:3])
def test_a_number_of_batches_below_one_is_refused_where_the_loader_is_made(name, number):
    with pytest.raises(ValueError, match=f"{name}={number} must be at least 1"):
        pl.MpDeviceLoader([], "ltc:0", **{name: number})


@pytest.mark.parametrize("number", [2, numpy.int32(2), torch.tensor(2)])
def test_integers_of_other_libraries_count_batches(number):
    loader = pl.MpDeviceLoader(numbered(8), "ltc:0", batches_per_execution=number, batchdim=-1)
    with metrics.counted() as grown:
        assert values(loader) == [*range(8)]
    assert grown["MarkStep"] == 5


def test_other_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="fixed_batch_size=8 is neither True nor False"):
        pl.MpDeviceLoader([], "ltc:0", fixed_batch_size=8)
    with pytest.raises(TypeError, match="batch_dim"):
        pl.MpDeviceLoader([], "ltc:0", batch_dim=0)
    with pytest.raises(TypeError, match="takes a list of them"):
        pl.ParallelLoader([], "ltc:0")
    with pytest.raises(ValueError, match="names ltc:0 twice"):
        pl.ParallelLoader([], ["ltc:0", 0])


def test_uploads_are_counted_as_transfers():
    with metrics.counted() as grown:
        list(pl.MpDeviceLoader(numbered(4), "ltc:0"))
    assert grown["OutboundData"] == 4


def test_training_with_a_device_loader_equals_training_with_moves(equal):
    def trained(batches):
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2).to("ltc:0")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            ltm.optimizer_step(optimizer)
        return model.weight.detach().cpu()

    source = list(torch.randn(6, 4, 3))
    equal(trained(pl.MpDeviceLoader(source, "ltc:0")), trained([x.to("ltc:0") for x in source]))


def test_a_closed_loader_says_so():
    loader = pl.ParallelLoader(numbered(4), DEVICES)
    consumer = iter(loader.per_device_loader("ltc:0"))
    loader.close()
    for ask in (lambda: next(consumer), lambda: iter(loader.per_device_loader("ltc:1"))):
        with pytest.raises(RuntimeError, match="is closed"):
            ask()
