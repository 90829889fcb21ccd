"""DataParallel: a model, a thread and a device each, and errors that reach the caller."""

import contextlib
import threading
import time
import traceback

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
import ltc.distributed.data_parallel as dp
from ltc.debug import metrics
from ltc.distributed.transport import session
from ltc.errors import PeerFailure
from tests.distributed.replicas import wait_until_others_are_in

pytestmark = pytest.mark.devices(4)

DEVICES = ["ltc:0", "ltc:1"]
HANG_SECONDS = 600  # of a machine that is busy with other things


def batches(count: int) -> list:
    draw = torch.Generator().manual_seed(2)
    return [
        (torch.randn(4, 3, generator=draw), torch.randn(4, 2, generator=draw)) for _ in range(count)
    ]


def train(model, loader, device, context):
    """Where each batch was, and how many there were."""
    optimizer = context.getattr_or("optimizer", lambda: torch.optim.SGD(model.parameters(), 0.1))
    seen = []
    for index, (x, y) in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        ltm.optimizer_step(optimizer)
        seen.append((index, str(x.device)))
    return str(device), seen


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(("DataParallel", "ltc loader"))]


def wait_until_no_thread_runs() -> None:
    for thread in threads():
        thread.join(HANG_SECONDS)
    assert not threads()


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    yield
    wait_until_no_thread_runs()


def test_a_device_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match="device_ids names ltc:1 twice"):
        dp.DataParallel(lambda: nn.Linear(3, 2), device_ids=["ltc:0", "ltc:1", "ltc:1"])


def test_every_device_trains_on_its_own_batches_and_results_come_in_device_order():
    parallel = dp.DataParallel(lambda: nn.Linear(3, 2), device_ids=DEVICES)
    results = parallel(train, batches(6))
    assert results == [
        (device, [(index, device) for index in range(3)]) for device in ("ltc:0", "ltc:1")
    ]


@pytest.mark.parametrize("network", [nn.Flatten, lambda: nn.Linear(3, 2), nn.Linear(3, 2)])
def test_a_class_a_factory_and_a_module_give_every_device_an_equal_model(network):
    parallel = dp.DataParallel(network, device_ids=DEVICES)
    first, second = parallel.models
    assert first is not second
    assert {str(p.device) for p in second.parameters()} <= {"ltc:1"}
    for one, other in zip(first.parameters(), second.parameters()):
        assert torch.equal(one.cpu(), other.cpu())


def test_no_devices_given_means_all_of_the_process():
    assert dp.DataParallel(nn.Flatten).devices == ltm.get_lazy_supported_devices()


def test_inside_a_thread_the_device_is_current_and_the_replica_is_known():
    def who(model, loader, device, context):
        return ltm.get_ordinal(), ltm.xrt_world_size(), ltm.lazy_device() == device

    parallel = dp.DataParallel(nn.Flatten, device_ids=DEVICES)
    assert parallel(who, batches(2)) == [(0, 2, True), (1, 2, True)]
    assert (ltm.get_ordinal(), ltm.xrt_world_size()) == (0, 1)


def test_a_loader_without_numbers_can_be_asked_for():
    def shapes(model, loader, device, context):
        assert len(loader) == 2
        return [list(x.shape) for x, y in loader]

    parallel = dp.DataParallel(nn.Flatten, device_ids=DEVICES, enumerate_batches=False)
    assert parallel(shapes, batches(4)) == [[[4, 3], [4, 3]]] * 2


def test_the_context_keeps_what_it_was_given_until_the_next_call():
    made = []

    def loop(model, loader, device, context):
        optimizer = context.getattr_or("optimizer", lambda: made.append(1) or object())
        return id(optimizer), context.getattr_or("seen", 5)

    parallel = dp.DataParallel(nn.Flatten, device_ids=DEVICES)
    assert parallel(loop, batches(2)) == parallel(loop, batches(2))
    assert len(made) == 2 and parallel(loop, batches(2))[0][1] == 5


def test_keywords_of_the_call_reach_the_loop():
    def loop(model, loader, device, context, scale, shift=0):
        return scale, shift

    parallel = dp.DataParallel(nn.Flatten, device_ids=DEVICES)
    assert parallel(loop, batches(2), scale=3, shift=1) == [(3, 1)] * 2


def test_keywords_of_the_constructor_reach_the_loader():
    parallel = dp.DataParallel(
        nn.Linear(3, 2), device_ids=DEVICES, batches_per_execution=5, uneven="pad"
    )
    assert [len(seen) for _, seen in parallel(train, batches(3))] == [2, 2]


def test_without_devices_the_loop_runs_in_the_caller_where_the_module_is():
    def loop(model, loader, device, context):
        assert model is module and context.device == device
        return threading.current_thread(), str(device), [index for index, _ in loader]

    module = nn.Linear(3, 2)
    parallel = dp.DataParallel(module, device_ids=[])
    assert parallel(loop, batches(2)) == [(threading.current_thread(), "cpu", [0, 1])]
    assert parallel.devices == []


def test_without_devices_a_module_in_two_places_is_refused():
    module = nn.ModuleList([nn.Linear(1, 1).to("ltc:0"), nn.Linear(1, 1)])
    with pytest.raises(RuntimeError, match="Model uses more than one device: cpu, ltc:0"):
        dp.DataParallel(module, device_ids=[])


def test_equal_graphs_are_compiled_once_for_all_devices():
    class Net(nn.Module):
        """Of sizes that no other test uses, so that nothing is compiled before."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return (self.layer(x) * 1.375).sin()

    def compiles(devices):
        with metrics.counted() as grown:
            dp.DataParallel(Net, device_ids=devices)(train, batches(4 * len(devices)))
            ltm.wait_device_ops()
        return grown["UncachedCompile"]

    # A step has a first form, and one for the steps after it, whose gradients replace others.
    assert 0 < compiles(["ltc:0", "ltc:1", "ltc:2", "ltc:3"]) <= 3


@pytest.mark.parametrize("at", [0, 1])
def test_the_first_exception_is_raised_in_the_caller_and_names_its_device(at):
    def loop(model, loader, device, context):
        for index, _ in loader:
            if index == 2 and str(device) == DEVICES[at]:
                raise LookupError("the loop's own")

    parallel = dp.DataParallel(nn.Linear(3, 2), device_ids=DEVICES)
    with pytest.raises(LookupError, match="the loop's own") as caught:
        parallel(loop, batches(100))
    text = "".join(traceback.format_exception(caught.value))
    assert f"Exception in model function for device={DEVICES[at]}" in text
    assert 'raise LookupError("the loop\'s own")' in text


def test_a_device_that_leaves_its_loop_early_fails_the_call_it_was_in():
    def loop(model, loader, device, context):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for index, (x, y) in loader:
            if index == 1 and str(device) == "ltc:1":
                break
            model(x).sum().backward()
            ltm.optimizer_step(optimizer)

    parallel = dp.DataParallel(nn.Linear(3, 2), device_ids=DEVICES)
    with pytest.raises(PeerFailure) as caught:  # long before LTC_PEER_TIMEOUT
        parallel(loop, batches(4))
    assert "The function of replica 1 has returned while replica 0 waits for it" in str(
        caught.value
    )
    assert f"{__file__}:{loop.__code__.co_firstlineno + 6} in loop" in str(caught.value)
    assert [len(seen) for _, seen in parallel(train, batches(4))] == [2, 2]


def test_a_step_that_nobody_waits_for_fails_the_call_that_began_it():
    def loop(model, loader, device, context):
        at = torch.tensor([7]).to(device)
        context.kept = torch.ones(3, device=device).index_select(0, at)
        ltm.mark_step()

    parallel = dp.DataParallel(nn.Flatten, device_ids=DEVICES)
    with pytest.raises(IndexError) as caught:
        parallel(loop, batches(2))
    assert caught.value.__notes__[-1].startswith("Exception in model function for device=ltc:")
    assert parallel(lambda model, loader, device, context: str(device), batches(2)) == DEVICES


def test_the_error_of_a_sample_reaches_the_caller():
    def source():
        yield from batches(3)
        raise KeyError("sample")

    parallel = dp.DataParallel(nn.Linear(3, 2), device_ids=DEVICES)
    with pytest.raises(KeyError, match="sample"):
        parallel(train, source())


def test_a_thread_that_asks_for_no_batch_is_stopped_too(monkeypatch):
    monkeypatch.setattr(dp, "STOP_SECONDS", 0.2)

    def loop(model, loader, device, context):
        if str(device) == "ltc:0":
            raise LookupError
        while True:
            time.sleep(0.01)

    with pytest.raises(LookupError):
        dp.DataParallel(nn.Flatten, device_ids=DEVICES)(loop, batches(2))


def test_after_an_exception_the_devices_train_on():
    def loop(model, loader, device, context):
        for index, (x, y) in loader:
            model(x).sum().backward()
            if str(device) == "ltc:1":
                raise LookupError

    parallel = dp.DataParallel(nn.Linear(3, 2), device_ids=DEVICES)
    for _ in range(2):
        with pytest.raises(LookupError):
            parallel(loop, batches(10))
        assert [len(seen) for _, seen in parallel(train, batches(4))] == [2, 2]


def test_ctrl_c_in_the_caller_stops_the_threads(monkeypatch):
    monkeypatch.setattr(dp, "STOP_SECONDS", 0.2)
    begun, ended = threading.Event(), []

    def loop(model, loader, device, context):
        with contextlib.suppress(Exception):
            try:
                while True:
                    begun.set()
                    time.sleep(0.01)
            finally:
                ended.append(str(device))

    def fail():
        begun.wait()
        1 / 0

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(dp._Threads, "_raise", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dp.DataParallel(nn.Flatten, device_ids=DEVICES)(
            lambda model, loader, device, context: (
                fail() if str(device) == "ltc:1" else loop(model, loader, device, context)
            ),
            batches(2),
        )
    wait_until_no_thread_runs()  # told to end, it does when it has the processor
    assert ended == ["ltc:0"]


@pytest.mark.parametrize("wait", ["in a rendezvous", "in a step"])
def test_an_exception_frees_the_threads_that_wait_for_the_one_that_raised(wait, monkeypatch):
    """By itself: neither their time limit ends the wait nor an error raised in the thread."""
    interrupted = []
    monkeypatch.setattr(dp, "_raise_in", interrupted.append)
    monkeypatch.setattr(dp, "STOP_SECONDS", HANG_SECONDS)
    monkeypatch.setenv("LTC_PEER_TIMEOUT", str(2 * HANG_SECONDS))

    def loop(model, loader, device, context):
        if str(device) == "ltc:1":
            here = session.current()
            if wait == "in a rendezvous":
                wait_until_others_are_in("rendezvous", here.host)
            else:
                wait_until_others_are_in("all_reduce", here.programs)
            raise LookupError("before the others were reached")
        if wait == "in a rendezvous":
            ltm.rendezvous("all")
        ltm.all_reduce(ltm.REDUCE_SUM, torch.ones(3, device=device)).cpu()

    parallel = dp.DataParallel(nn.Linear(3, 2), device_ids=DEVICES)
    for _ in range(3):
        with pytest.raises(LookupError, match="before the others"):
            parallel(loop, batches(2))
        assert not interrupted
        assert [len(seen) for _, seen in parallel(train, batches(4))] == [2, 2]


def test_replicas_train_as_one_model_with_all_batches(equal):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    parallel = dp.DataParallel(model, device_ids=DEVICES)
    parallel(train, batches(6))
    first, second = (replica.weight.detach().cpu() for replica in parallel.models)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    source = batches(6)
    for pair in zip(source[0::2], source[1::2]):
        optimizer.zero_grad()
        x, y = (torch.cat(parts) for parts in zip(*pair))
        (model(x) - y).square().mean().backward()
        optimizer.step()
    assert torch.equal(first, second)
    equal(first, model.weight.detach())


def test_a_device_that_returns_before_its_first_exchange_is_named():
    def loop(model, loader, device, context):
        return ltm.rendezvous("both") if str(device) == "ltc:0" else "returned"

    parallel = dp.DataParallel(nn.Flatten, device_ids=DEVICES)
    with pytest.raises(PeerFailure, match="replica 1 has returned while replica 0 waits for it"):
        parallel(loop, batches(2))


def test_a_device_that_returns_first_may_have_left_the_others_its_part():
    def loop(model, loader, device, context):
        total = ltm.all_reduce("sum", torch.ones(5000, device=device))
        if str(device) == "ltc:0":
            time.sleep(1.5)  # longer than a replica that returned may keep others waiting
        return total

    parallel = dp.DataParallel(nn.Flatten, device_ids=DEVICES)
    for _ in range(2):
        assert [total.sum().item() for total in parallel(loop, batches(2))] == [10000.0, 10000.0]
