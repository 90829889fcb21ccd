"""Convolutions by transformed tiles: against float64, beside PyTorch's error, and when they are chosen."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.ir import ops
from ltc.ir.node import make
from ltc.llvm.conv.geometry import Geometry
from ltc.llvm.conv.winograd import (
    PLACES,
    is_convolution_faster,
    is_input_gradient_faster,
    tiles_together,
    winograd_convolution,
    winograd_input_gradient,
)
from ltc.llvm.conv.winograd_weight_grad import (
    is_weight_gradient_faster,
    winograd_weight_gradient,
)
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.isa import AVX2, AVX512, LEVEL_2_BYTES, SSE2
from ltc.llvm.emit.vectors import Vectors
from ltc.llvm.ops.conv_and_pool import kernels_of
from tests.unit.llvm_kernels import HOST, ISAS, guarded, is_untouched, run_all, tolerance

aten = torch.ops.aten

# Images, channels, outputs, extents, padding.
CASES = {
    "even": (2, 16, 32, (8, 12), (1, 1)),
    "odd": (3, 33, 40, (7, 9), (1, 1)),
    "few_channels": (2, 3, 5, (9, 6), (1, 1)),
    "one_channel": (1, 1, 1, (5, 5), (1, 1)),
    "unpadded": (1, 20, 70, (8, 11), (0, 0)),
    "much_padding": (2, 8, 16, (5, 4), (2, 2)),
    "uneven_padding": (2, 8, 16, (6, 5), (2, 0)),
    "more_padding_than_taps": (1, 4, 8, (3, 4), (4, 3)),
    "one_result": (4, 8, 16, (3, 3), (0, 0)),
    "tiny": (5, 24, 8, (1, 1), (1, 1)),
    "line": (2, 8, 16, (1, 13), (1, 1)),
    "several_blocks": (17, 70, 20, (14, 14), (1, 1)),
    "several_chunks": (1, 150, 48, (6, 6), (1, 1)),
    "several_groups": (5, 130, 200, (6, 7), (1, 1)),
    "no_images": (0, 8, 16, (6, 6), (1, 1)),
}


def setting(images, channels, outputs, extents, padding, stride=1, dilation=1, groups=1, taps=3):
    """Operand, weight, gradient of the result, and the geometry."""
    x = torch.randn(images, channels, *extents)
    weight = torch.randn(outputs, channels // groups, taps, taps)
    window = (stride,) * 2, padding, (dilation,) * 2
    shape = aten.convolution(
        x.to("meta"), weight.to("meta"), None, *window, False, [0, 0], groups
    ).shape
    geometry = Geometry(tuple(x.shape), tuple(weight.shape), tuple(shape), *window, groups)
    return x, weight, torch.randn(shape), geometry


def convolved(x, weight, geometry):
    return aten.convolution(x, weight, None, *window_of(geometry))


def gradients(gradient, x, weight, geometry):
    """Those of the operand and the weight."""
    wanted = [True, True, False]
    return aten.convolution_backward(gradient, x, weight, None, *window_of(geometry), wanted)[:2]


def window_of(geometry):
    window = geometry.stride, geometry.padding, geometry.dilation
    return *window, False, [0, 0], geometry.groups


def last(x):
    return x.movedim(1, -1).contiguous()


def check(sequence, isa, expected, count, **operands):
    result, memory = guarded(expected.shape, torch.float32)
    run_all(sequence, isa, result=result, **operands)
    assert is_untouched(memory)
    error = (result.double() - expected).abs()
    assert not error.numel() or error.max() <= tolerance(torch.float32, count)
    again, _ = guarded(expected.shape, torch.float32)
    run_all(sequence, isa, tasks=1, result=again, **operands)
    assert torch.equal(result, again), "the number of tasks changed a result"


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_convolution_and_its_gradients(case, isa):
    x, weight, gradient, geometry = setting(*case)
    wide = gradient.double(), x.double(), weight.double()
    of_x, of_weight = gradients(*wide, geometry)
    outputs, channels = weight.shape[:2]
    check(
        winograd_convolution("kernel", torch.float32, geometry, isa), isa,
        last(convolved(*wide[1:], geometry)), 9 * channels, operand=last(x), weight=weight,
    )  # fmt: skip
    check(
        winograd_input_gradient("kernel", torch.float32, geometry, isa), isa,
        last(of_x), 9 * outputs, gradient=last(gradient), weight=weight,
    )  # fmt: skip
    check(
        winograd_weight_gradient("kernel", torch.float32, geometry, isa), isa,
        of_weight, gradient[:, 0].numel(), gradient=last(gradient), operand=last(x),
    )  # fmt: skip


def test_an_epilogue_sees_every_element_once():
    def doubled(builder, value, row, column, mask):
        return builder.binary("fadd", "float", value, value)

    x, weight, gradient, geometry = setting(*CASES["odd"])
    made = winograd_convolution("kernel", torch.float32, geometry, HOST, doubled)
    expected = 2 * last(convolved(x.double(), weight.double(), geometry))
    check(made, HOST, expected, 18 * x.shape[1], operand=last(x), weight=weight)
    of_x, of_weight = gradients(gradient.double(), x.double(), weight.double(), geometry)
    made = winograd_input_gradient("kernel", torch.float32, geometry, HOST, doubled)
    count = 18 * weight.shape[0]
    check(made, HOST, 2 * last(of_x), count, gradient=last(gradient), weight=weight)
    made = winograd_weight_gradient("kernel", torch.float32, geometry, HOST, doubled)
    count = 2 * gradient[:, 0].numel()
    check(made, HOST, 2 * of_weight, count, gradient=last(gradient), operand=last(x))


def test_an_epilogue_is_given_the_place_of_each_result():
    """Its row is the position and its column the output channel: what it reads there is added."""

    def added(builder, value, row, column, mask):
        place = builder.value(f"add i64 {row * 40}, {column}")
        there = builder.value(f"getelementptr float, ptr %p3, i64 {place}")
        return builder.binary("fadd", "float", value, builder.effect(
            f"load <{builder.width} x float>, ptr {there}, align 4"
        ))  # fmt: skip

    x, weight, _, geometry = setting(3, 8, 40, (7, 9), (1, 1))
    expected = last(convolved(x.double(), weight.double(), geometry))
    other = torch.randn(expected.numel() + 64)  # lanes that are not stored read beyond the last one
    made = winograd_convolution("kernel", torch.float32, geometry, HOST, added, 1)
    expected = expected + other[: expected.numel()].view(expected.shape)
    check(made, HOST, expected, 9 * 8, operand=last(x), weight=weight, operand0=other)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("channels, extent", [(64, 14), (256, 6), (512, 7)])
def test_errors_are_at_most_twice_those_of_pytorch(channels, extent, mean):
    x, weight, gradient, geometry = setting(4, channels, channels, (extent,) * 2, (1, 1))
    x, weight = x.relu() + mean, weight / (4.5 * channels) ** 0.5
    given = {"operand": last(x), "weight": weight, "gradient": last(gradient)}
    for make_kernels, exact, theirs in zip(
        (winograd_convolution, winograd_input_gradient, winograd_weight_gradient),
        results(gradient.double(), x.double(), weight.double(), geometry),
        results(gradient, x, weight, geometry),
    ):
        ours = torch.empty_like(theirs)
        sequence = make_kernels("kernel", torch.float32, geometry, HOST)
        run_all(sequence, HOST, result=ours, **given)
        for measure in (lambda e: e.abs().max(), lambda e: e.pow(2).mean().sqrt()):
            assert measure(ours - exact) <= 2 * measure(theirs - exact)


def results(gradient, x, weight, geometry):
    of_x, of_weight = gradients(gradient, x, weight, geometry)
    return last(convolved(x, weight, geometry)), last(of_x), of_weight


@pytest.mark.parametrize("place", [(4, 4), (5, 6), (0, 8), (8, 3)])
def test_an_infinity_reaches_only_what_meets_it(place):
    x, weight, _, geometry = setting(1, 8, 16, (9, 9), (1, 1))
    x[0, 3, *place] = float("inf")
    result = torch.empty(last(convolved(x, weight, geometry)).shape)
    sequence = winograd_convolution("kernel", torch.float32, geometry, HOST)
    run_all(sequence, HOST, operand=last(x), weight=weight, result=result)
    assert torch.equal(result.isfinite(), last(convolved(x, weight, geometry)).isfinite())


# --- the choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", [AVX2, AVX512, SSE2], ids=lambda isa: isa.name)
@pytest.mark.parametrize("channels, extent", [(64, 32), (128, 16), (256, 8), (64, 56)])
def test_layers_of_many_positions_are_transformed(channels, extent, isa):
    geometry = setting(16, channels, channels, (extent,) * 2, (1, 1))[3]
    assert is_convolution_faster(torch.float32, geometry, isa)
    assert is_input_gradient_faster(torch.float32, geometry, isa)
    assert is_weight_gradient_faster(torch.float32, geometry, isa)


def test_weights_from_afar_come_while_others_are_multiplied():
    geometry = setting(32, 512, 512, (4, 4), (1, 1))[3]
    assert is_convolution_faster(torch.float32, geometry, AVX512)
    few = replace(geometry, operand=(2, 512, 4, 4), result=(2, 512, 4, 4))
    assert not is_convolution_faster(torch.float32, few, AVX512)  # they are made for few tiles


def test_transformed_tiles_fit_half_of_a_level_2_cache():
    for isa in (AVX2, AVX512):
        v = Vectors(Builder(), isa, torch.float32)
        for channels in (16, 64, 100, 256):
            held = tiles_together(v, channels) * PLACES * 4 * -(-channels // v.width) * v.width
            assert LEVEL_2_BYTES // 4 < held <= LEVEL_2_BYTES // 2


@pytest.mark.parametrize("case, options", [
    ((16, 3, 64, (32, 32), (1, 1)), {}),  # a tile is transformed for few products
    ((64, 1, 32, (28, 28), (0, 0)), {}),  # so it is, of one channel, and lanes are idle
    ((1, 512, 512, (2, 2), (1, 1)), {}),  # weights are transformed for few tiles
    ((16, 64, 64, (32, 32), (1, 1)), {"stride": 2}),
    ((16, 64, 64, (32, 32), (1, 1)), {"dilation": 2}),
    ((16, 64, 64, (32, 32), (1, 1)), {"groups": 4}),
    ((16, 64, 64, (32, 32), (1, 1)), {"taps": 5}),
    ((16, 0, 64, (32, 32), (1, 1)), {}),
])  # fmt: skip
def test_others_are_not(case, options):
    with torch.device("meta"):
        geometry = setting(*case, **options)[3]
    assert not is_convolution_faster(torch.float32, geometry, HOST)
    assert not is_weight_gradient_faster(torch.float32, geometry, HOST)


def test_a_block_fits_the_stack_of_a_thread():
    with torch.device("meta"):
        geometry = setting(16, 40000, 64, (8, 8), (1, 1))[3]
    assert not is_convolution_faster(torch.float32, geometry, HOST)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_are_not(dtype):
    geometry = setting(16, 64, 64, (32, 32), (1, 1))[3]
    assert not is_convolution_faster(dtype, geometry, HOST)
    assert not is_input_gradient_faster(dtype, geometry, HOST)
    assert not is_weight_gradient_faster(dtype, geometry, HOST)


def test_few_channels_of_an_operand_keep_the_kernels_that_are_for_them():
    geometry = setting(16, 3, 64, (32, 32), (1, 1))[3]
    assert not is_input_gradient_faster(torch.float32, geometry, AVX512)


def node_of(op, geometry):
    def layout(shape):
        return shape[0], *shape[2:], shape[1]

    x, weight, result = layout(geometry.operand), geometry.weight, layout(geometry.result)
    shapes = {
        ops.CONVOLUTION: (x, weight), ops.CONVOLUTION_INPUT_GRADIENT: (result, weight),
        ops.CONVOLUTION_WEIGHT_GRADIENT: (result, x),
    }[op]  # fmt: skip
    shape = {
        ops.CONVOLUTION_INPUT_GRADIENT: {"shape": x}, ops.CONVOLUTION_WEIGHT_GRADIENT: {"shape": weight},
    }.get(op, {})  # fmt: skip
    inputs = [
        make(ops.INPUT, index=i, dtype=torch.float32, shape=one) for i, one in enumerate(shapes)
    ]
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    return make(op, *inputs, channels_last=True, **window, **shape)


@pytest.mark.parametrize("op", [
    ops.CONVOLUTION, ops.CONVOLUTION_INPUT_GRADIENT, ops.CONVOLUTION_WEIGHT_GRADIENT,
])  # fmt: skip
def test_a_setting_turns_them_off(op):
    node = node_of(op, setting(16, 64, 64, (16, 16), (1, 1))[3])
    names = {name for kernel in kernels_of(node, HOST).pointers for name in kernel}
    assert names & {"transformed", "sums"}
    with config.override(LTC_WINOGRAD="0"):
        names = {name for kernel in kernels_of(node, HOST).pointers for name in kernel}
    assert not names & {"transformed", "sums"}


def test_another_batch_size_is_another_number_and_the_same_text():
    def texts(images):
        geometry = setting(images, 32, 32, (20, 20), (1, 1))[3]
        made = (winograd_convolution, winograd_input_gradient, winograd_weight_gradient)
        sequences = [make("kernel", torch.float32, geometry, HOST) for make in made]
        return [kernel.text for sequence in sequences for kernel in sequence.kernels]

    assert texts(20) == texts(33)


# --- programs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_a_training_step_of_batches_of_any_size(threads):
    """The gradients of a network whose convolutions are transformed, at sizes that become symbols."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 40, 3, padding=1), nn.ReLU(),
            nn.Conv2d(40, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        exact = [t.double() for t in model.state_dict().values()]
        ours = nn.Sequential(*model).to("ltc")
        for images in (4, 4, 4, 6, 9, 5):
            x = torch.randn(images, 3, 17, 17)
            check_step(ours, exact, x)
    finally:
        torch.set_num_threads(before)


def check_step(model, exact, x):
    weights = [t.clone().requires_grad_() for t in exact]
    h = x.double()
    for k, padding in ((0, 1), (2, 1), (4, 0)):
        h = nn.functional.conv2d(h, weights[k], weights[k + 1], padding=padding)
        h = h.relu() if k < 4 else h
    h.mean((2, 3)).pow(2).sum().backward()
    model.zero_grad()
    model(x.to("ltc")).pow(2).sum().backward()
    ltm.mark_step()
    for one, other in zip(model.parameters(), weights):
        torch.testing.assert_close(one.grad.cpu().double(), other.grad, rtol=2e-4, atol=2e-5)
