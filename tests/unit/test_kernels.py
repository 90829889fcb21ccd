"""Kernels are made when they are first called; until then they weigh little."""

import gc

import torch

from ltc.device.kernels import lazily_built, source_of


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
