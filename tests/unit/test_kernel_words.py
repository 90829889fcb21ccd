"""Kernels in words, and the parts of a kernel as one."""

import pytest

from ltc.profiling.analysis.kernel_parts import groups_of_parts, joined_parts, kernel_words

WORDS = {
    "convolution [64, 28, 28, 16] [32, 16, 3, 3] then [64 28 28 32] 2->1 add maximum": (
        "conv 3x3, 16 to 32 channels, then add, maximum"
    ),
    "convolution_input_gradient [64, 28, 28, 32] [32, 16, 3, 3]": (
        "conv 3x3, 16 to 32 channels, backward of input"
    ),
    "part 1 of convolution_weight_gradient [64, 28, 28, 16] [64, 28, 28, 1]": (
        "conv, backward of weight, of 64x28x28x16 and 64x28x28x1"
    ),
    "matmul [64, 6272] [6272, 10]": "matrix product 64x6272 by 6272x10",
    "max_pool_gradient [64, 14, 14, 32] [64, 14, 14, 32]": "max pool backward of 64x14x14x32",
    "sort [8, 4], by PyTorch": "sort of 8x4",
    "[64 16 | 1 28 28] 1->1 sum": "sum over 1x28x28, 64x16",
    "[64 32 14 14] 1->1 copy": "copy, 64x32x14x14",
    "[] 1->1 cast abs lt": "cast, abs, lt",
    "kernel": "kernel",
}


@pytest.mark.parametrize(("name", "words"), WORDS.items())
def test_a_kernel_has_words(name, words):
    assert kernel_words(name) == words


def test_a_loop_nest_is_named_by_the_calls_that_it_computes():
    ops = ["aten::_log_softmax", "aten::nll_loss_backward", "aten::linear", "aten::relu"]
    words = kernel_words("[64 | 10] 4->2 5*where 3*eq", ops)
    assert words == "log softmax, nll loss backward, linear and 1 more over 10, 64"


def part(name: str, seconds: float, multiply_adds: int = 0) -> dict:
    return {"name": name, "seconds": seconds, "launches": 3, "read_bytes": 4, "written_bytes": 2,
            "multiply_adds": multiply_adds, "operations": 0}  # fmt: skip


def test_parts_are_one_kernel_launched_as_often_as_each():
    parts = [part("part 1 of matmul [2, 2] [2, 2]", 0.5), part("matmul [2, 2] [2, 2]", 0.25, 8)]
    (group,) = groups_of_parts(parts)
    whole = joined_parts(group)
    assert whole["name"] == "matmul [2, 2] [2, 2]"
    assert (whole["seconds"], whole["launches"], whole["multiply_adds"]) == (0.75, 3, 8)
    assert whole["read_bytes"] == 8


def test_kernels_of_one_name_that_follow_one_another_are_several():
    names = ["part 1 of a [1]", "a [1]", "part 1 of a [1]", "a [1]", "b [1]", "b [1]"]
    groups = groups_of_parts(part(name, 0.1) for name in names)
    assert [len(group) for group in groups] == [2, 2, 1, 1]
