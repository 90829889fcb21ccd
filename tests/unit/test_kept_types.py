"""Types of results that one process finds out and another reads."""

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device.recording.recorder import device_at
from ltc.device.shapes import meta, type_cache
from tests.recorders import forget_paths


@pytest.fixture(autouse=True)
def no_formulas(monkeypatch):
    """Every call is one that a kernel has to be asked about."""
    monkeypatch.setattr(meta, "types_by_formula", lambda *question: None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    with config.override(LTC_CACHE_DIR=str(tmp_path / "cache")):
        forget()
        yield tmp_path / "cache"
        forget()


def forget() -> None:
    """As in a new process: nothing recorded, nothing known."""
    ltm.mark_step(wait=True)
    forget_paths()
    device_at(0).recorder().restart()
    meta._known.clear()
    type_cache._read.clear()
    type_cache._unwritten.clear()


def asked(work) -> tuple[int, list]:
    """How often a kernel was asked for types during `work()`, and the types of what it gave."""
    with metrics.counted() as grown:
        results = work()
        ltm.mark_step(wait=True)  # an operation of the test's own is gone with the test
    types = [None if r is None else (tuple(r.shape), r.dtype) for r in results]
    return grown["MetaInference"], types


def batch_norm():
    x = torch.ones(4, 3, 5, 5, device="ltc")
    mean, deviation = torch.zeros(3, device="ltc"), torch.ones(3, device="ltc")
    return torch.ops.aten._native_batch_norm_legit(x, None, None, mean, deviation, True, 0.1, 1e-5)


def convolution_gradients():
    x, weight = torch.ones(2, 3, 8, 8, device="ltc"), torch.ones(4, 3, 3, 3, device="ltc")
    gradient = torch.ones(2, 4, 6, 6, device="ltc")
    return torch.ops.aten.convolution_backward(
        gradient, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
    )


def indices():
    return torch.ones(5, 2, device="ltc").topk(2, dim=0)


def parts():
    return torch.ones(7, 2, device="ltc").split([3, 4])


def remainder():
    return (torch.ones(3, dtype=torch.int32, device="ltc").remainder(2.5),)


def turned():
    x = torch.ones(2, 3, 4, 4, device="ltc")
    return (torch.ones_like(x, dtype=torch.float64, memory_format=torch.channels_last),)


@pytest.mark.parametrize(
    "work", [batch_norm, convolution_gradients, indices, parts, remainder, turned]
)
def test_a_later_process_asks_no_kernel_and_gets_the_same(work):
    count, types = asked(work)
    assert count > 0
    forget()
    assert asked(work) == (0, types)


def test_without_a_cache_every_process_asks(own_cache):
    with config.override(LTC_CACHE="0"):
        count, _ = asked(batch_norm)
        forget()
        assert asked(batch_norm)[0] == count
    assert not own_cache.exists()


def test_torchs_default_dtype_is_part_of_the_question():
    def quotient():
        x = torch.ones(3, dtype=torch.int64, device="ltc")
        return (x / x,)

    assert asked(quotient)[1] == [((3,), torch.float32)]
    forget()
    torch.set_default_dtype(torch.float64)
    try:
        assert asked(quotient)[1] == [((3,), torch.float64)]
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_operation_of_the_user_is_asked_in_every_process():
    library = torch.library.Library("kept_types", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CPU")
    torch.library.register_fake("kept_types::twice", torch.empty_like, lib=library)
    operand = torch.ones(3).to("ltc")

    def work():
        return (torch.ops.kept_types.twice(operand),)

    assert asked(work)[0] == 1
    forget()
    assert asked(work)[0] == 1


def spread_of_one():
    return (torch.ones(1, device="ltc").std(),)


def real_parts():
    return (torch.ones(2, dtype=torch.complex64, device="ltc").float(),)


def products_at_indices():
    x = torch.ones(3, device="ltc")
    return (x.index_reduce(0, torch.arange(3, device="ltc"), x, "prod"),)


@pytest.mark.parametrize("work", [spread_of_one, real_parts, products_at_indices])
def test_torch_warns_in_a_later_process_too(work):
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # some warnings come once a process
    try:
        for _ in range(2):
            forget()
            with pytest.warns(UserWarning, match="freedom|imaginary|beta"):
                work()
    finally:
        torch.set_warn_always(before)


def test_an_overload_keeps_the_kinds_of_calls_that_came_last(monkeypatch):
    monkeypatch.setattr(type_cache, "MOST", 3)

    def sums(*lengths):
        forget()
        operands = [torch.ones(n, 100_000).to("ltc") for n in lengths]
        return asked(lambda: [x.sum(0) for x in operands])[0]

    assert sums(2, 3, 4, 5) == 4
    assert sums(3, 4, 5) == 0
    assert sums(2) == 1


def test_what_another_process_has_written_meanwhile_stays():
    asked(indices)
    forget()
    asked(lambda: torch.ones(6, 2, device="ltc").topk(2, dim=0))
    forget()
    assert asked(indices)[0] == 0
