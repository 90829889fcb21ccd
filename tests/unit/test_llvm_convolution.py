"""Generated convolutions and poolings against torch's own in float64, on every instruction set."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ltc.ir import ops
from ltc.ir.node import make
from ltc.llvm.conv.axes import forward_axes
from ltc.llvm.conv.geometry import Geometry
from ltc.llvm.conv.nchw import convolution, convolution_input_gradient
from ltc.llvm.conv.nchw_weight_grad import convolution_weight_gradient
from ltc.llvm.conv.nhwc import channels_last_convolution, channels_last_input_gradient
from ltc.llvm.conv.nhwc_depthwise import (
    depthwise_convolution,
    depthwise_input_gradient,
    depthwise_weight_gradient,
    is_depthwise,
)  # fmt: skip
from ltc.llvm.conv.nhwc_input_tile import UncopiedInputTile, ascending, input_tile_of
from ltc.llvm.conv.nhwc_weight_grad import (
    CopiedGradientPanel,
    PartialSums,
    channels_last_weight_gradient,
)
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.isa import AVX512
from ltc.llvm.emit.vectors import Vectors
from ltc.llvm.ops.conv_and_pool import kernels_of
from ltc.llvm.pooling.nchw import (
    Pool,
    average_pool,
    average_pool_gradient,
    max_pool,
    max_pool_gradient,
)  # fmt: skip
from ltc.llvm.pooling.nhwc import (
    ChannelsLastPool,
    channels_last_average_pool,
    channels_last_average_pool_gradient,
    channels_last_max_pool,
    channels_last_max_pool_gradient,
)  # fmt: skip
from tests.drawn import drawn
from tests.unit.llvm_kernels import (
    HOST,
    ISAS,
    entry,
    guarded,
    is_untouched,
    run,
    run_all,
    tolerance,
)  # fmt: skip

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
NAN = float("nan")

# Images, channels, outputs, spatial, kernel, stride, padding, dilation, groups.
CASES = {
    "plain": (2, 3, 8, (9, 11), (3, 3), 1, 1, 1, 1),
    "one_channel": (2, 1, 32, (28, 28), (3, 3), 1, 0, 1, 1),
    "stride": (1, 8, 16, (20, 33), (3, 3), 2, 1, 1, 1),
    "grouped_1d": (2, 6, 8, (17,), (5,), 2, 2, 1, 2),
    "three_dimensions": (1, 4, 8, (5, 6, 7), (3, 2, 3), 2, 1, 1, 1),
    "depthwise": (2, 16, 16, (14, 14), (3, 3), 1, 1, 1, 16),
    "depthwise_stride": (2, 8, 16, (14, 14), (3, 3), 2, 1, 1, 8),
    "dilated": (1, 5, 7, (12, 40), (3, 5), 1, 2, 2, 1),
    "long_line": (1, 20, 30, (1300,), (3,), 1, 1, 1, 1),
    "many_outputs": (3, 20, 520, (6, 5), (3, 3), 2, 1, 1, 1),
    "many_channels": (1, 200, 40, (7, 7), (3, 3), 1, 1, 1, 1),
    "pointwise": (2, 8, 8, (8, 8), (1, 1), 1, 0, 1, 1),
    "pointwise_stride_of_many": (3, 40, 36, (9, 8), (1, 1), 2, 0, 1, 1),
    "pointwise_that_aliases": (2, 1024, 20, (5, 5), (1, 1), 2, 0, 1, 1),
    "pointwise_groups": (2, 32, 24, (7, 6), (1, 1), 3, 0, 1, 2),
    "pointwise_stride": (2, 8, 8, (8, 8), (1, 1), 2, 0, 1, 1),
    "wide_kernel": (1, 3, 20, (20, 20), (7, 9), 2, 3, 1, 1),
    "very_wide_kernel": (2, 3, 4, (100,), (37,), 2, 5, 2, 1),
    "stride_and_dilation": (1, 4, 4, (13, 13), (3, 3), 2, 1, 2, 1),
    "stride_over_kernel": (1, 4, 6, (10, 10), (2, 2), 3, 0, 1, 2),
    "kernel_is_operand": (1, 3, 2, (4, 4), (4, 4), 1, 0, 1, 1),
    "no_images": (0, 3, 4, (4, 4), (3, 3), 1, 0, 1, 1),
    "padding_only": (1, 2, 4, (1, 1), (3, 3), 1, 2, 1, 1),
}


def setting(case, dtype):
    """Operand, weight, gradient of the result, and the geometry."""
    n, channels, outputs, spatial, kernel, stride, padding, dilation, groups = case
    rank = len(spatial)
    x = torch.randn(n, channels, *spatial).to(dtype)
    weight = torch.randn(outputs, channels // groups, *kernel).to(dtype)
    window = ((stride,) * rank, (padding,) * rank, (dilation,) * rank)
    shape = aten.convolution(
        x.to("meta"), weight.to("meta"), None, *window, False, [0] * rank, groups
    ).shape
    geometry = Geometry(tuple(x.shape), tuple(weight.shape), tuple(shape), *window, groups)
    return x, weight, torch.randn(shape).to(dtype), geometry


def arguments_of(geometry):
    rank = len(geometry.stride)
    window = (geometry.stride, geometry.padding, geometry.dilation)
    return (None, *window, False, [0] * rank, geometry.groups)


def gradients(gradient, x, weight, geometry):
    wide = (gradient.double(), x.double(), weight.double())
    return aten.convolution_backward(*wide, *arguments_of(geometry), [True, True, False])


def check(sequence, isa, expected, dtype, count, **operands):
    result, memory = guarded(expected.shape, dtype)
    run_all(sequence, isa, result=result, **operands)
    error = (result.double() - expected).abs()
    assert is_untouched(memory)
    assert not error.numel() or error.max() <= tolerance(dtype, count) + 1e-30
    again, _ = guarded(expected.shape, dtype)
    run_all(sequence, isa, tasks=1, result=again, **operands)
    assert torch.equal(result, again), "the number of tasks changed a result"


def check_all(case, dtype, isa):
    x, weight, gradient, geometry = setting(case, dtype)
    expected = aten.convolution(x.double(), weight.double(), *arguments_of(geometry))
    in_x, in_weight, _ = gradients(gradient, x, weight, geometry)
    depth, taps = weight[0].numel(), weight[0, 0].numel()
    check(
        convolution("kernel", dtype, geometry, isa), isa, expected, dtype, depth,
        operand=x, weight=weight,
    )  # fmt: skip
    check(
        convolution_input_gradient("kernel", dtype, geometry, isa), isa, in_x, dtype,
        taps * weight.shape[0], gradient=gradient, weight=weight,
    )  # fmt: skip
    check(
        convolution_weight_gradient("kernel", dtype, geometry, isa), isa, in_weight, dtype,
        gradient[:, 0].numel(), gradient=gradient, operand=x,
    )  # fmt: skip


def last(x):
    """A [N, C, *spatial] tensor as [N, *spatial, C]."""
    return x.movedim(1, -1).contiguous()


def check_channels_last(case, dtype, isa):
    x, weight, gradient, geometry = setting(case, dtype)
    expected = aten.convolution(x.double(), weight.double(), *arguments_of(geometry))
    in_x, in_weight, _ = gradients(gradient, x, weight, geometry)
    depth, taps = weight[0].numel(), weight[0, 0].numel()
    check(
        channels_last_convolution("kernel", dtype, geometry, isa), isa, last(expected), dtype,
        depth, operand=last(x), weight=weight,
    )  # fmt: skip
    check(
        channels_last_input_gradient("kernel", dtype, geometry, isa), isa, last(in_x), dtype,
        taps * weight.shape[0], gradient=last(gradient), weight=weight,
    )  # fmt: skip
    check(
        channels_last_weight_gradient("kernel", dtype, geometry, isa), isa, in_weight, dtype,
        gradient[:, 0].numel(), gradient=last(gradient), operand=last(x),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_convolution_and_its_gradients(case, dtype):
    check_all(case, dtype, HOST)


# Kernels that keep the sums of some channels in memory, and lines that several tiles share.
LAST_CASES = CASES | {
    "deep_channels": (3, 300, 40, (4, 4), (3, 3), 1, 1, 1, 1),
    "deep_channels_back": (3, 40, 300, (5, 5), (3, 3), 2, 1, 1, 1),
    "aliasing_channels": (2, 1024, 8, (3, 3), (3, 3), 1, 1, 1, 1),
    "across_images": (17, 20, 40, (8, 8), (3, 3), 1, 1, 1, 1),
    "deep_across_images": (9, 300, 70, (4, 4), (3, 3), 1, 1, 1, 1),
    "strided_across_images": (20, 16, 33, (9, 7), (3, 3), 2, 1, 1, 1),
    "dilated_across_images": (12, 8, 16, (6, 7), (3, 3), 1, 2, 2, 2),
    "several_strips": (1, 3, 40, (50, 40), (3, 3), 1, 1, 1, 1),
    "channel_totals": (3, 1, 36, (9, 40), (3, 3), 1, 1, 1, 1),
    "channel_totals_strided": (2, 3, 33, (9, 12), (4, 4), 2, 1, 1, 1),
    "channel_totals_dilated": (2, 2, 16, (9, 33), (2, 3), 1, 2, 2, 1),
    "channel_totals_3d": (1, 4, 20, (5, 6, 7), (3, 2, 3), 1, 1, 1, 1),
    "one_channel_padded": (3, 1, 40, (50, 40), (3, 3), 1, 1, 1, 1),
    "few_channels_of_groups": (5, 6, 51, (9, 8), (2, 2), 2, 1, 1, 3),
    "windows_apart": (3, 5, 33, (13, 14), (2, 3), 3, 0, 1, 1),
    "windows_apart_in_strips": (2, 40, 12, (61, 50), (1, 1), 2, 0, 1, 1),
    "windows_apart_of_groups": (4, 22, 18, (9, 11), (1, 1), 3, 0, 1, 2),
    "windows_side_by_side": (2, 3, 20, (32, 32), (16, 16), 16, 0, 1, 1),
    "windows_apart_3d": (2, 7, 9, (5, 7, 9), (2, 2, 2), 2, 0, 1, 1),
    "windows_apart_1d": (5, 130, 4, (31,), (3,), 4, 0, 1, 1),
}


def copies_the_gradient(channels):
    """Whether the gradient of a weight [32, channels, 3, 3] reads a copy."""
    geometry = setting((2, channels, 32, (9, 9), (3, 3), 1, 0, 1, 1), torch.float32)[3]
    sums = PartialSums(torch.float32, geometry, AVX512)
    return isinstance(sums.gradient, CopiedGradientPanel)


def test_a_gradient_whose_rows_all_fit_in_registers_is_read_where_it_lies():
    assert not copies_the_gradient(1) and copies_the_gradient(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LAST_CASES.values(), ids=LAST_CASES)
def test_a_convolution_and_its_gradients_with_channels_last(case, dtype):
    check_channels_last(case, dtype, HOST)


@pytest.mark.parametrize("isa", ISAS[1:], ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", ["plain", "stride", "grouped_1d", "depthwise", "many_channels"])
def test_lesser_instruction_sets(name, isa):
    check_all(CASES[name], torch.float32, isa)
    check_channels_last(CASES[name], torch.float32, isa)


@st.composite
def cases(draw):
    rank, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    few = st.integers(1, 5)
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    stride, padding, dilation = (draw(st.integers(low, 3)) for low in (1, 0, 1))
    spatial = tuple(
        max(1, dilation * (k - 1) + 1 - 2 * padding + draw(st.integers(0, 9))) for k in kernel
    )
    channels, outputs = groups * draw(few), groups * draw(few)
    return draw(few), channels, outputs, spatial, kernel, stride, padding, dilation, groups


def texts_of_batch(images, spatial, groups=1):
    """What a convolution of 32 channels and its gradients compile."""
    geometry = setting((images, 32, 32, spatial, (3, 3), 1, 1, 1, groups), torch.float32)[3]
    makers = (channels_last_convolution, channels_last_input_gradient,
              channels_last_weight_gradient)  # fmt: skip
    if groups > 1:
        makers = (depthwise_convolution, depthwise_input_gradient, depthwise_weight_gradient)
    made = [make("kernel", torch.float32, geometry, HOST) for make in makers]
    return [kernel.text for sequence in made for kernel in sequence.kernels]


@pytest.mark.parametrize("groups", [1, 32])
def test_another_batch_size_is_another_number_and_the_same_text(groups):
    assert texts_of_batch(20, (40, 40), groups) == texts_of_batch(33, (40, 40), groups)


def test_of_small_images_batch_sizes_share_few_texts():
    texts = [texts_of_batch(images, (6, 6)) for images in range(16, 60)]
    most = 3 if HOST.name == "neon" else 2
    assert max(len(set(kind)) for kind in zip(*texts)) <= most


# Images, channels, spatial, kernel, stride, padding, dilation.
DEPTHWISE = {
    "plain": (2, 19, (14, 14), (3, 3), 1, 1, 1),
    "stride": (3, 32, (15, 14), (3, 3), 2, 1, 1),
    "large": (1, 48, (20, 33), (5, 7), 1, 2, 1),
    "dilated": (2, 16, (14, 14), (3, 3), 1, 2, 2),
    "line": (2, 24, (40,), (5,), 3, 2, 1),
    "many_taps_of_a_line": (2, 24, (40,), (13,), 2, 6, 1),
    "three_dimensions": (1, 8, (5, 6, 7), (3, 2, 3), 2, 1, 1),
    "stride_over_kernel": (2, 16, (9, 9), (2, 2), 3, 0, 1),
}


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", DEPTHWISE.values(), ids=DEPTHWISE)
def test_a_depthwise_convolution_and_its_gradients(case, dtype, isa):
    n, channels, *window = case
    case = (n, channels, channels, *window, channels)
    x, weight, gradient, geometry = setting(case, dtype)
    assert is_depthwise(geometry)
    expected = aten.convolution(x.double(), weight.double(), *arguments_of(geometry))
    in_x, in_weight, _ = gradients(gradient, x, weight, geometry)
    taps = weight[0].numel()
    check(
        depthwise_convolution("kernel", dtype, geometry, isa), isa, last(expected), dtype, taps,
        operand=last(x), weight=weight,
    )  # fmt: skip
    check(
        depthwise_input_gradient("kernel", dtype, geometry, isa), isa, last(in_x), dtype, taps,
        gradient=last(gradient), weight=weight,
    )  # fmt: skip
    check(
        depthwise_weight_gradient("kernel", dtype, geometry, isa), isa, in_weight, dtype,
        gradient[:, 0].numel(), gradient=last(gradient), operand=last(x),
    )  # fmt: skip


@drawn(25)
@given(cases())
def test_convolutions_of_any_shape(case):
    check_all(case, torch.float32, HOST)
    check_channels_last(case, torch.float32, HOST)


@pytest.mark.parametrize("case", ["plain", "many_channels", "depthwise", "pointwise"])
def test_an_epilogue_sees_every_element_once(case):
    def doubled(builder, value, row, column, mask):
        return builder.binary("fadd", "float", value, value)

    x, weight, _, geometry = setting(CASES[case], torch.float32)
    expected = 2 * aten.convolution(x.double(), weight.double(), *arguments_of(geometry))
    made = convolution("kernel", torch.float32, geometry, HOST, doubled)
    check(made, HOST, expected, torch.float32, 4 * weight[0].numel(), operand=x, weight=weight)


@pytest.mark.parametrize("padding, dtype, copied", [
    (0, torch.float32, False), (1, torch.float32, True), (0, torch.bfloat16, True),
])  # fmt: skip
def test_what_is_read_once_where_it_lies_is_not_copied(padding, dtype, copied):
    geometry = setting((2, 40, 16, (9, 8), (1, 1), 2, padding, 1, 1), dtype)[3]
    v = Vectors(Builder(), HOST, dtype)
    strip = input_tile_of(v, ascending(forward_axes(*geometry.window)), 40, 40, 1, 4)
    assert isinstance(strip, UncopiedInputTile) != copied


# Few outputs leave a task a part of the images, many give each task panels of its own.
@pytest.mark.parametrize("outputs", [8, 40, 520])
def test_an_epilogue_of_channels_last_is_asked_ahead_and_sees_every_element_once(outputs):
    class Doubled:
        fetched = 0

        def fetch(self, builder, row, column):
            self.fetched += 1

        def __call__(self, builder, value, row, column, mask):
            return builder.binary("fadd", "float", value, value)

    case = (3, 20, outputs, (6, 5), (3, 3), 1, 1, 1, 1)
    x, weight, gradient, geometry = setting(case, torch.float32)
    expected = 2 * aten.convolution(x.double(), weight.double(), *arguments_of(geometry))
    forward, backward = Doubled(), Doubled()
    made = channels_last_convolution("kernel", torch.float32, geometry, HOST, forward)
    check(
        made, HOST, last(expected), torch.float32, 4 * weight[0].numel(), operand=last(x),
        weight=weight,
    )  # fmt: skip
    expected = 2 * gradients(gradient, x, weight, geometry)[1]
    made = channels_last_weight_gradient("kernel", torch.float32, geometry, HOST, backward)
    check(
        made, HOST, expected, torch.float32, 4 * gradient[:, 0].numel(),
        gradient=last(gradient), operand=last(x),
    )  # fmt: skip
    assert forward.fetched and backward.fetched


def test_sums_are_no_further_from_the_truth_than_torchs_own():
    def error(result, expected):
        return (result.double() - expected).pow(2).mean().sqrt().item()

    x, weight, gradient, geometry = setting(
        (4, 64, 48, (14, 14), (3, 3), 1, 1, 1, 1), torch.float32
    )
    rest = arguments_of(geometry)
    exact = aten.convolution(x.double(), weight.double(), *rest)
    result = torch.empty(exact.shape)
    made = convolution("kernel", torch.float32, geometry, HOST)
    run_all(made, HOST, operand=x, weight=weight, result=result)
    assert error(result, exact) <= 1.1 * error(aten.convolution(x, weight, *rest), exact)

    exact = gradients(gradient, x, weight, geometry)[1]
    theirs = aten.convolution_backward(gradient, x, weight, *rest, [False, True, False])[1]
    result = torch.empty(exact.shape)
    made = convolution_weight_gradient("kernel", torch.float32, geometry, HOST)
    run_all(made, HOST, gradient=gradient, operand=x, result=result)
    assert error(result, exact) <= 1.1 * error(theirs, exact)


# --- pooling ------------------------------------------------------------------------------------

# Spatial, kernel, stride, padding, dilation, ceil_mode.
WINDOWS = {
    "halves": ((24, 24), (2, 2), (2, 2), (0, 0), (1, 1), False),
    "odd": ((9, 11), (2, 2), (2, 2), (0, 0), (1, 1), False),
    "dilated": ((9, 37), (3, 3), (1, 2), (1, 1), (2, 1), False),
    "rounded_up": ((10, 10), (3, 3), (2, 2), (1, 1), (1, 1), True),
    "three_dimensions": ((5, 6, 7), (2, 3, 2), (2, 1, 3), (1, 1, 0), (1, 1, 1), False),
    "whole": ((7, 7), (7, 7), (7, 7), (0, 0), (1, 1), False),
    "wide": ((13, 40), (3, 5), (3, 3), (0, 2), (1, 1), True),
}


def pool_of(window, shape):
    spatial, kernel, stride, padding, dilation, _ = window
    return Pool(spatial, tuple(shape[2:]), kernel, stride, padding, dilation, planes=6)


def max_pooled(x, window):
    function = {2: aten.max_pool2d_with_indices, 3: aten.max_pool3d_with_indices}
    return function[x.ndim - 2](x, *window[1:])


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_max_pool_is_torchs_bit_for_bit(window, dtype, isa):
    x = torch.randn(2, 3, *window[0]).to(dtype)
    x.view(-1)[[5, 7]] = NAN
    x[1, 1], x[1, 2] = 1, float("-inf")  # all are equal: the first is taken
    expected, expected_indices = max_pooled(x, window)
    (result, memory), (indices, _) = (
        guarded(expected.shape, dtype),
        guarded(expected.shape, torch.int64),
    )
    run(max_pool("kernel", dtype, pool_of(window, expected.shape), isa), isa, x, result, indices)
    assert is_untouched(memory) and torch.equal(indices, expected_indices)
    assert torch.allclose(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_the_gradient_of_max_pool_adds_where_indices_say(window, dtype):
    x = torch.randn(2, 3, *window[0]).to(dtype)
    y, indices = max_pooled(x, window)
    gradient, fault = torch.randn_like(y), torch.zeros(1, dtype=torch.int64)
    expected = torch.zeros(6, x[0, 0].numel(), dtype=dtype)
    expected = expected.scatter_add_(1, indices.view(6, -1), gradient.view(6, -1)).view(x.shape)
    result, memory = guarded(x.shape, dtype)
    kernel = max_pool_gradient("kernel", dtype, 6, window[0], tuple(y.shape[2:]), HOST)
    run(kernel, HOST, gradient, indices, result, fault)
    assert is_untouched(memory) and torch.equal(result, expected) and not fault.item()


def test_an_index_outside_its_plane_is_reported_and_adds_nothing():
    gradient, fault = torch.ones(1, 2), torch.zeros(1, dtype=torch.int64)
    indices = torch.tensor([[3, 4]])
    result, memory = guarded((1, 2, 2), torch.float32)
    kernel = max_pool_gradient("kernel", torch.float32, 1, (2, 2), (1, 2), HOST)
    run(kernel, HOST, gradient, indices, result, fault)
    assert is_untouched(memory) and result.tolist() == [[[0, 0], [0, 1]]]
    assert fault.item() == (4 << 8) + 1


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [w for w in WINDOWS.values() if set(w[4]) == {1}])
def test_average_pool_and_its_gradient(window, dtype, isa):
    spatial, kernel, stride, padding, _, ceil = window
    rank = len(spatial)
    forward = {2: aten.avg_pool2d, 3: aten.avg_pool3d}[rank]
    backward = {2: aten.avg_pool2d_backward, 3: aten.avg_pool3d_backward}[rank]
    x = torch.randn(2, 3, *spatial).to(dtype)
    for count_padding, divisor in itertools.product((True, False), (0, 5)):
        options = (kernel, stride, padding, ceil, count_padding, divisor or None)
        expected = forward(x.double(), *options)
        pool = pool_of(window, expected.shape)
        result, memory = guarded(expected.shape, dtype)
        made = average_pool("kernel", dtype, pool, isa, count_padding, divisor)
        run(made, isa, x, result)
        assert is_untouched(memory) and (result - expected).abs().max() <= tolerance(dtype, 1)

        gradient = torch.randn(expected.shape).to(dtype)
        expected = backward(gradient.double(), x.double(), *options)
        result, memory = guarded(x.shape, dtype)
        made = average_pool_gradient("kernel", dtype, pool, isa, count_padding, divisor)
        run(made, isa, gradient, result)
        assert is_untouched(memory) and (result - expected).abs().max() <= tolerance(dtype, 4)


def turned_pool_of(window, shape):
    spatial, kernel, stride, padding, dilation, _ = window
    return ChannelsLastPool(
        spatial, tuple(shape[2:]), kernel, stride, padding, dilation, images=2, channels=19
    )


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_max_pool_and_its_gradient_with_channels_last(window, dtype, isa):
    x = torch.randn(2, 19, *window[0]).to(dtype)
    x.view(-1)[[5, 7]] = NAN
    x[1, 1], x[1, 2] = 1, float("-inf")
    y, places = max_pooled(x, window)
    pool = turned_pool_of(window, y.shape)
    shape = last(y).shape
    (result, memory), (indices, _) = guarded(shape, dtype), guarded(shape, torch.int64)
    run(channels_last_max_pool("kernel", dtype, pool, isa), isa, last(x), result, indices)
    assert is_untouched(memory) and torch.equal(indices, last(places))
    assert torch.allclose(result, last(y), rtol=0, atol=0, equal_nan=True)

    gradient = torch.randint(-9, 9, y.shape).to(dtype)  # every order of additions is exact
    expected = torch.zeros(2, 19, x[0, 0].numel()).scatter_add_(
        2, places.flatten(2), gradient.float().flatten(2)
    ).view(x.shape)  # fmt: skip
    result, memory = guarded(last(x).shape, dtype)
    kernel = channels_last_max_pool_gradient("kernel", dtype, pool, isa)
    run(kernel, isa, last(gradient), indices, result)
    assert is_untouched(memory) and torch.equal(result.float(), last(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [w for w in WINDOWS.values() if set(w[4]) == {1}])
def test_average_pool_and_its_gradient_with_channels_last(window, dtype):
    spatial, kernel, stride, padding, _, ceil = window
    forward = {2: aten.avg_pool2d, 3: aten.avg_pool3d}[len(spatial)]
    backward = {2: aten.avg_pool2d_backward, 3: aten.avg_pool3d_backward}[len(spatial)]
    x = torch.randn(2, 19, *spatial).to(dtype)
    for count_padding, divisor in itertools.product((True, False), (0, 5)):
        options = (kernel, stride, padding, ceil, count_padding, divisor or None)
        expected = last(forward(x.double(), *options))
        pool = turned_pool_of(window, expected.movedim(-1, 1).shape)
        result, memory = guarded(expected.shape, dtype)
        made = channels_last_average_pool("kernel", dtype, pool, HOST, count_padding, divisor)
        run(made, HOST, last(x), result)
        assert is_untouched(memory) and (result - expected).abs().max() <= tolerance(dtype, 1)

        gradient = torch.randn(expected.movedim(-1, 1).shape).to(dtype)
        expected = last(backward(gradient.double(), x.double(), *options))
        result, memory = guarded(expected.shape, dtype)
        made = channels_last_average_pool_gradient(
            "kernel", dtype, pool, HOST, count_padding, divisor
        )
        run(made, HOST, last(gradient), result)
        assert is_untouched(memory) and (result - expected).abs().max() <= tolerance(dtype, 4)


# --- nodes --------------------------------------------------------------------------------------


def test_nodes_name_what_their_kernels_read():
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(2, 8, 9, 9))
    weight = make(ops.INPUT, index=1, dtype=torch.float32, shape=(8, 8, 3, 3))
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    node = make(ops.CONVOLUTION, x, weight, groups=1, **window)
    assert kernels_of(node, HOST).reads == (x, weight)
    assert kernels_of(node, HOST).pointers == (("read1", "read0", "result0"),)
    back = make(ops.CONVOLUTION_WEIGHT_GRADIENT, node, x, groups=1, shape=weight.shape, **window)
    made = kernels_of(back, HOST)
    assert made.pointers == (("read0", "read1", "result0"),)
    assert not made.scratch
    back = make(ops.CONVOLUTION_INPUT_GRADIENT, node, weight, groups=1, shape=x.shape, **window)
    made = kernels_of(back, HOST)
    assert made.pointers == (("read1", "transposed"), ("transposed", "read0", "result0"))


def test_equal_nodes_of_other_graphs_have_equal_code():
    def code(index):
        x = make(ops.INPUT, index=index, dtype=torch.float32, shape=(2, 4, 8, 8))
        pool = make(
            ops.AVERAGE_POOL, x, kernel=(2, 2), stride=(2, 2), padding=(0, 0), dilation=(1, 1),
            count_padding=True, divisor=0, shape=(2, 4, 4, 4),
        )  # fmt: skip
        return kernels_of(pool, HOST).kernels[0].text

    assert code(0) == code(1) and entry(code(0), HOST) is entry(code(1), HOST)


def test_lines_too_long_for_a_stack_are_left_to_the_reference():
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(1, 4, 400_000))
    weight = make(ops.INPUT, index=1, dtype=torch.float32, shape=(8, 4, 100_000))
    window = {"stride": (1,), "padding": (0,), "dilation": (1,), "groups": 1}
    node = make(ops.CONVOLUTION, x, weight, **window)
    assert kernels_of(node, HOST) is None


# --- whole networks ------------------------------------------------------------------------------


class Residual(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)


def conv(channels, outputs, kernel, **options):
    return torch.nn.Conv2d(channels, outputs, kernel, **options)


NETWORKS = {
    "residual": lambda: [
        conv(8, 64, 3, padding=1), Residual(conv(64, 64, 1)), torch.nn.ReLU6(),
        Residual(torch.nn.BatchNorm2d(64), conv(64, 64, 3, padding=1)),
    ],
    "pooled": lambda: [
        conv(8, 24, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1), conv(24, 16, 3, stride=2),
        torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(16 * 1, 5),
    ],
    "depthwise": lambda: [
        conv(8, 32, 1), torch.nn.BatchNorm2d(32), torch.nn.ReLU6(),
        conv(32, 32, 3, groups=32, stride=2, padding=1), torch.nn.GELU(), conv(32, 16, 1),
    ],
    "groups": lambda: [
        conv(8, 32, 3, padding=1), torch.nn.GroupNorm(4, 32), torch.nn.SiLU(),
        conv(32, 32, 3, groups=4, padding=2, dilation=2), torch.nn.ConvTranspose2d(32, 8, 4, 2, 1),
    ],
    "few_channels": lambda: [
        conv(8, 3, 3), torch.nn.Tanh(), conv(3, 16, (1, 3), stride=(2, 1)), torch.nn.Sigmoid(),
    ],
}  # fmt: skip


@pytest.mark.parametrize("make_layers", NETWORKS.values(), ids=NETWORKS)
def test_a_networks_gradients_are_those_of_float64(make_layers):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*make_layers())
    x = torch.randn(4, 8, 12, 12)
    exact = copy.deepcopy(net).double()
    wanted = x.double().requires_grad_()
    y = exact(wanted)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    ours = copy.deepcopy(net).to("ltc")
    given = x.to("ltc").requires_grad_()
    result = ours(given)
    (result * weights.float().to("ltc")).sum().backward()
    pairs = [(result, y), (given.grad, wanted.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(ours.parameters(), exact.parameters())]
    largest = max(q.abs().max().item() for q in (p.grad for p in exact.parameters()))
    for one, other in pairs:
        # A bias before a normalization has no gradient but rounding.
        error = (one.detach().cpu().double() - other.detach()).abs().max()
        assert error <= 1e-5 * max(other.abs().max().item(), largest)
