"""torch.set_default_dtype: the same calls give other types after it, in every thread."""

import threading

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.debug import metrics

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
