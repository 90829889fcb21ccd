"""torch.set_default_dtype: the same calls give other types after it, in every thread."""

import threading

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics

pytestmark = pytest.mark.also_native

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def counted(device):
    return torch.arange(1, 5, device=device)


CALLS = {
    "zeros": lambda device: torch.zeros(3, device=device),
    "full": lambda device: torch.full((3,), 1 / 3, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 7, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "hann_window": lambda device: torch.hann_window(9, device=device),
    "integers / integers": lambda device: counted(device) / (counted(device) + 2),
    "integers / number": lambda device: counted(device) / 3,
    "integers * number": lambda device: counted(device) * 0.1,
    "sqrt of integers": lambda device: counted(device).sqrt(),
    "sigmoid of integers": lambda device: counted(device).sigmoid(),
    "where of numbers": lambda device: torch.where(counted(device) > 2, 0.1, 0.3),
    "a list": lambda device: torch._foreach_div([counted(device)], 3)[0],
    "a complex number": lambda device: counted(device) * 0.1j,
    # float32 has not every integer of these: what is compared is of the default type
    "integers > number": lambda device: counted(device) + 2**24 > 2**24 + 2.5,
}


@pytest.mark.compared
@pytest.mark.parametrize("name", CALLS)
def test_the_same_calls_give_what_the_default_says(device, name):
    found = []
    for dtype in DTYPES:
        torch.set_default_dtype(dtype)
        result = CALLS[name](device)
        ltm.mark_step()
        found.append((str(result.dtype), result.cpu()))
    return found


@pytest.mark.compared
def test_what_is_pending_keeps_the_type_it_was_recorded_with(device):
    torch.set_default_dtype(torch.float64)
    third = counted(device) / 3 + torch.linspace(0, 1, 4, device=device)
    torch.set_default_dtype(torch.float32)
    after = counted(device) / 3
    return third, after, third + after


@pytest.mark.compared
def test_a_default_tensor_type_is_a_default_dtype(device):
    found = []
    for kind in (torch.DoubleTensor, torch.FloatTensor):
        torch.set_default_tensor_type(kind)
        found.append(counted(device) / 3)
    return found


def test_a_change_cuts_the_step_and_is_counted_and_no_change_does_not():
    with metrics.counted() as grown:
        x = counted("ltc") / 3
        torch.set_default_dtype(torch.get_default_dtype())
        assert grown["DefaultDtypeFlush"] == 0
        torch.set_default_dtype(torch.float64)
        assert grown["DefaultDtypeFlush"] == 1
        torch.set_default_dtype(torch.float32)
    assert grown["DefaultDtypeFlush"] == 1
    assert x.dtype == torch.float32


@pytest.mark.native("it counts how often what is pending is cut")
def test_a_change_cuts_nothing_where_what_is_pending_names_its_types():
    layer = torch.nn.Linear(3, 2, device="ltc")
    rows, labels = torch.randn(4, 3, device="ltc"), torch.tensor([0, 1, 1, 0], device="ltc")
    ltm.mark_step()

    def step(x, y):
        hidden = layer(x)
        torch.set_default_dtype(torch.float64)
        loss = torch.nn.functional.cross_entropy(hidden, y)
        torch.set_default_dtype(torch.float32)
        loss.backward()
        with torch.no_grad():
            layer.weight -= 0.1 * layer.weight.grad
        layer.weight.grad = layer.bias.grad = None
        return loss.detach()

    def programs():
        with metrics.counted() as grown:
            step(rows, labels)
            ltm.mark_step(wait=True)
        return [grown[name] for name in ("ExecuteTime", "RecordedEntries", "DefaultDtypeFlush")]

    assert programs()[0] == programs()[0] == 1
    assert programs() == [1, 0, 0]


@pytest.mark.compared
def test_what_follows_a_change_in_the_middle_has_the_new_type(device):
    x, found = torch.linspace(0, 1, 4, device=device, dtype=torch.float32), []
    ltm.mark_step()
    for dtype in DTYPES[1:]:
        y = x * 2
        torch.set_default_dtype(dtype)
        found += [y + counted(device) / 3, torch.zeros(2, device=device), y.double() * 0.1]
        ltm.mark_step()
    return [(str(z.dtype), z) for z in found]


@pytest.mark.native("it counts how often what is pending is cut")
def test_a_change_that_is_refused_leaves_the_step_whole():
    x = torch.linspace(0, 1, 4, dtype=torch.float32).to("ltc")
    with metrics.counted() as grown:
        y = x * 2
        with pytest.raises(TypeError):
            torch.set_default_dtype(torch.int64)
        z = y + 1
        ltm.mark_step(wait=True)
    assert grown["ExecuteTime"] == 1
    assert torch.equal(z.cpu(), x.cpu() * 2 + 1)


@pytest.mark.parametrize("tier", ["auto", "native"])
def test_a_program_that_is_compiled_later_keeps_its_type(tier):
    """What is compared is 2**24 + 3, which float32 has not, with 2**24 + 3.5."""

    def found(dtype):
        torch.set_default_dtype(dtype)
        more = counted("ltc") + 2**24 >= 2**24 + 3.5
        ltm.mark_step()
        return more.tolist()

    with config.override(LTC_TIER=tier):
        for _ in range(4):
            for dtype in DTYPES[:2]:
                torch.set_default_dtype(dtype)
                expected = (counted("cpu") + 2**24 >= 2**24 + 3.5).tolist()
                assert found(dtype) == expected


def test_each_default_keeps_its_recorded_paths():
    def step():
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            x = counted("ltc") / 3
            ltm.mark_step()
            assert x.dtype == dtype

    step()
    with metrics.counted() as grown:
        for _ in range(3):
            step()
    assert grown["RecordedEntries"] == grown["UncachedCompile"] == 0


def test_other_threads_follow_the_change():
    changed, pending, found = threading.Event(), threading.Event(), []

    def record():
        early = counted("ltc") / 3
        ltm.mark_step()
        early = counted("ltc") / 3
        pending.set()
        changed.wait()
        late = counted("ltc") / 3
        found.extend([early, late, early + late])

    thread = threading.Thread(target=record)
    thread.start()
    pending.wait()
    torch.set_default_dtype(torch.float64)
    changed.set()
    thread.join()
    assert [x.dtype for x in found] == [torch.float32, torch.float64, torch.float64]
    expected = counted("cpu").double() / 3
    torch.testing.assert_close(found[1].cpu(), expected, rtol=0, atol=0)
    torch.testing.assert_close(found[0].cpu(), expected.float(), rtol=0, atol=0)
