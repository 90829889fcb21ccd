"""What a channels-last convolution keeps in registers and in the caches together."""

import pytest
import torch

from ltc.ir import ops
from ltc.ir.node import make
from ltc.llvm.conv.axes import forward_axes
from ltc.llvm.conv.geometry import Geometry
from ltc.llvm.conv.nhwc import channels_last_input_gradient
from ltc.llvm.conv.nhwc_tile import tile_shape
from ltc.llvm.conv.nhwc_weight_grad import PartialSums, channels_last_weight_gradient
from ltc.llvm.conv.nhwc_window_tile import WindowTile
from ltc.llvm.emit.isa import AVX2, AVX512, LEVEL_2_BYTES
from ltc.llvm.ops.dispatch import prefers_channels_last
from tests.unit.llvm_kernels import HOST, run_all


def tile_of(extent, channels, isa, images=1):
    axes = forward_axes((extent,) * 2, (3, 3), (extent,) * 2, (1, 1), (1, 1), (1, 1))
    return tile_shape(axes, channels, isa, isa.lanes(4), images, images)


@pytest.mark.parametrize("isa", [AVX2, AVX512], ids=lambda isa: isa.name)
@pytest.mark.parametrize("extent, channels", [(56, 64), (28, 128), (14, 256), (32, 64)])
def test_a_tile_multiplies_more_often_than_it_loads(extent, channels, isa):
    tile = tile_of(extent, channels, isa)
    for width, _ in tile.widths:
        products, loads = width * tile.height * tile.vectors, width * tile.height + tile.vectors
        assert products >= 1.25 * loads, "loads wait for one another's banks of the cache"


@pytest.mark.parametrize("isa", [AVX2, AVX512], ids=lambda isa: isa.name)
def test_a_tile_of_small_images_is_of_several(isa):
    assert tile_of(4, 512, isa, images=32).across_images


def pointwise(images, channels, outputs, extent, stride):
    result = (images, outputs, *((extent - 1) // stride + 1,) * 2)
    weight = (outputs, channels, 1, 1)
    window = (stride,) * 2, (0, 0), (1, 1)
    return Geometry((images, channels, extent, extent), weight, result, *window, 1)


@pytest.mark.parametrize("images, channels, outputs, together", [
    (32, 64, 128, 8), (15, 64, 128, 4),  # of fewer images each item has fewer panels, so all threads work
    (32, 64, 1024, 32), (4, 256, 512, 8), (1, 64, 1024, 4), (4, 2048, 512, 1),
])  # fmt: skip
def test_an_operand_is_read_for_as_many_panels_as_have_small_sums(
    images, channels, outputs, together
):
    sums = PartialSums(torch.float32, pointwise(images, channels, outputs, 9, 2), AVX2)
    assert sums.split.together == together
    assert sums.split.items >= 16
    assert together == 1 or together * channels * sums.panel * 4 <= LEVEL_2_BYTES // 4


@pytest.mark.parametrize("stride, padding, dilation, groups, is_apart", [
    (3, 0, 1, 1, True), (4, 0, 1, 1, True),
    (2, 0, 1, 1, False),  # windows overlap
    (3, 1, 1, 1, False),  # they meet padding
    (5, 0, 2, 1, False), (3, 0, 1, 2, False),  # their lines are no runs of elements
])  # fmt: skip
def test_windows_that_do_not_overlap_are_copied_in_the_order_of_reading(
    stride, padding, dilation, groups, is_apart
):
    reach = dilation * 2 + 1
    windows = (30 + 2 * padding - reach) // stride + 1
    geometry = Geometry(
        (4, 16, 30, 30), (8, 16 // groups, 3, 3), (4, 8, windows, windows),
        (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups,
    )  # fmt: skip
    sums = PartialSums(torch.float32, geometry, AVX2)
    assert isinstance(sums.windows, WindowTile) == is_apart


@pytest.mark.parametrize(
    "channels, kernel, stride", [(256, 1, 2), (3, 16, 16), (64, 1, 1), (24, 2, 5)]
)
def test_a_strip_of_windows_counts_their_elements_alone(channels, kernel, stride):
    windows = (112 - kernel) // stride + 1
    geometry = Geometry(
        (4, channels, 112, 112), (64, channels, kernel, kernel), (4, 64, windows, windows),
        (stride,) * 2, (0, 0), (1, 1), 1,
    )  # fmt: skip
    sums = PartialSums(torch.float32, geometry, AVX2)
    line = windows * kernel * kernel * channels * 4
    assert line <= sums.lines * line <= LEVEL_2_BYTES // 2
    assert sums.strip_positions >= 256 or (sums.lines + 1) * line > LEVEL_2_BYTES // 4
    assert sums.windows.bytes < 1.2 * sums.lines * line + 4 * channels * kernel * kernel * 16


def test_what_a_panel_reads_next_is_asked_for_while_another_is_multiplied():
    def asks(outputs):
        made = channels_last_weight_gradient(
            "kernel", torch.float32, pointwise(16, 64, outputs, 9, 1), AVX2
        )
        return made.kernels[0].text.count("i32 0, i32 2, i32 1")  # to a level-2 cache

    assert asks(128) and asks(16)


@pytest.mark.parametrize("channels, is_product", [(64, False), (2048, True)])
def test_a_gradient_whose_strips_have_few_positions_is_a_product(channels, is_product):
    geometry = pointwise(8, channels, 512, 7, 1)
    made = channels_last_weight_gradient("kernel", torch.float32, geometry, AVX2)
    assert ("partial" in made.kernels[0].arguments) != is_product


@pytest.mark.parametrize("images, channels, outputs, stride", [
    (21, 24, 50, 1), (21, 24, 50, 2), (21, 1500, 50, 1),
    (1, 16, 1024, 2),  # all images in one chunk, and several panels together
])  # fmt: skip
def test_panels_together_add_up_to_the_gradient(images, channels, outputs, stride):
    geometry = pointwise(images, channels, outputs, 9, stride)
    x, gradient = torch.randn(geometry.operand), torch.randn(geometry.result)
    exact = torch.ops.aten.convolution_backward(
        gradient.double(), x.double(), torch.zeros(geometry.weight).double(), None,
        geometry.stride, (0, 0), (1, 1), False, [0, 0], 1, [False, True, False],
    )[1]  # fmt: skip
    sequence = channels_last_weight_gradient("kernel", torch.float32, geometry, HOST)
    for tasks in (1, 3, 16):
        result = torch.empty(geometry.weight)
        operands = {"gradient": gradient, "operand": x}
        given = {name: t.movedim(1, -1).contiguous() for name, t in operands.items()}
        run_all(sequence, HOST, tasks=tasks, result=result, **given)
        assert (result - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("kernel, stride", [((5, 5), 1), ((5, 5), 2), ((3, 3, 3), 1), ((11,), 1)])
@pytest.mark.parametrize("channels", [16, 20, 9])
def test_weights_of_many_taps_are_packed_for_an_input_gradient(kernel, stride, channels):
    rank, outputs = len(kernel), 12
    spatial = tuple(11 + k for k in kernel)
    result = tuple((extent - k) // stride + 1 for extent, k in zip(spatial, kernel))
    window = (stride,) * rank, (0,) * rank, (1,) * rank
    shapes = (2, channels, *spatial), (outputs, channels, *kernel), (2, outputs, *result)
    x, weight, gradient = map(torch.randn, shapes)
    exact = torch.ops.aten.convolution_backward(
        gradient.double(), x.double(), weight.double(), None, *window, False, [0] * rank, 1,
        [True, False, False],
    )[0].movedim(1, -1)  # fmt: skip
    sequence = channels_last_input_gradient(
        "kernel", torch.float32, Geometry(*shapes, *window, 1), HOST
    )
    found = torch.empty(exact.shape)
    last = gradient.movedim(1, -1).contiguous()
    run_all(sequence, HOST, weight=weight, gradient=last, result=found)
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize(
    "channels, outputs, expected", [(64, 1, False), (64, 6, True), (4, 6, False)]
)
def test_few_outputs_of_many_channels_are_computed_with_channels_last(channels, outputs, expected):
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(2, 9, 9, channels))
    weight = make(ops.INPUT, index=1, dtype=torch.float32, shape=(outputs, channels, 3, 3))
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    node = make(ops.CONVOLUTION, x, weight, channels_last=True, **window)
    if HOST.lanes(4) >= 8:
        assert prefers_channels_last(node) == expected
