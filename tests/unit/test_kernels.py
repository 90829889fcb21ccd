"""Kernels are made when they are first called; until then they weigh little."""

import gc

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.debug import metrics
from ltc.device.recording.fast_path import lazily_built, source_of


def test_a_kernel_that_nobody_calls_is_two_objects():
    lazily_built("aten::relu")  # what the first alone makes
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        kernels = [lazily_built("aten::relu") for _ in range(100)]
        after = len(gc.get_objects())
    finally:
        gc.enable()
    assert after - before <= 2 * len(kernels) + 1  # the list itself


def test_the_first_call_makes_the_kernel_and_later_ones_are_that_kernel():
    kernel = lazily_built("aten::relu")
    x = torch.tensor([-1.0, 2.0], device="ltc")
    before = kernel.__code__
    assert kernel(x).tolist() == [0, 2]
    assert kernel.__code__ is not before and kernel.__code__.co_filename == "<ltc kernel>"
    assert source_of("aten::relu").startswith("def kernel")
    assert kernel(x).tolist() == [0, 2]


@pytest.mark.parametrize(
    "views",
    [
        lambda x: x.split(2), lambda x: x.split([1, 3], 1), lambda x: x.unbind(1),
        lambda x: x.chunk(3), lambda x: x.tensor_split(2), lambda x: [x.t()],
    ],
)  # fmt: skip
def test_calls_that_make_views_are_recorded_again_by_their_kernels(views, equal):
    """Also those that make several at once: gates of a cell, heads of an attention."""
    x = torch.arange(12.0).view(3, 4)
    lazy = x.to("ltc")
    for repeated in (False, True):
        thorough = metrics.metric_data("LazyTracing")[0] if repeated else 0
        made, expected = views(lazy), views(x)
        if repeated:
            assert metrics.metric_data("LazyTracing")[0] == thorough
        made[-1].add_(1)  # and they are views of it
        expected[-1].add_(1)
        equal([*made, lazy], [*expected, x])
        ltm.mark_step()
