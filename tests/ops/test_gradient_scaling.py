"""What a GradScaler calls gives the CPU's bits, recorded."""

import math
from collections.abc import Iterable

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics

aten = torch.ops.aten
SHAPES = ((3,), (2, 5), (0,), (), (40, 33))


@pytest.fixture(params=["auto", "native"], autouse=True)
def tier(request):
    with config.override(LTC_TIER=request.param):
        yield


def assert_none_ran_eagerly(grown: Iterable[str]) -> None:
    assert not [name for name in grown if name.startswith(("aten::_amp", "extern"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wrong", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_gradients_are_unscaled_and_what_is_not_finite_is_found(dtype, wrong, shape):
    for inverse in (1.0, 1 / 65536, 0.3):
        gradients = [torch.randn(sizes).mul(9).to(dtype) for sizes in SHAPES]
        if wrong is not None:
            gradients[1][1, 2] = wrong
        operands = torch.zeros(shape), torch.full(shape, inverse)
        lazy, moved = [x.to("ltc") for x in gradients], [x.to("ltc") for x in operands]
        with metrics.counted() as grown:
            aten._amp_foreach_non_finite_check_and_unscale_(lazy, *moved)
            ltm.mark_step()
        aten._amp_foreach_non_finite_check_and_unscale_(gradients, *operands)
        for mine, theirs in zip([*lazy, moved[0]], [*gradients, operands[0]], strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
        assert_none_ran_eagerly(grown)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_the_scale_grows_and_shrinks_as_on_the_cpu(shape, found):
    for start in (65536.0, 0.7, 3e38):
        for count, interval in ((0, 3), (2, 3), (0, 1)):
            mine, theirs = (
                [torch.full(shape, start), torch.full(shape, count, dtype=torch.int32)]
                for _ in range(2)
            )
            mine, was_found = [x.to("ltc") for x in mine], torch.full(shape, found)
            with metrics.counted() as grown:
                aten._amp_update_scale_(*mine, was_found.to("ltc"), 1.5, 0.3, interval)
                ltm.mark_step()
            aten._amp_update_scale_(*theirs, was_found, 1.5, 0.3, interval)
            assert [x.cpu() for x in mine] == theirs
            assert_none_ran_eagerly(grown)
