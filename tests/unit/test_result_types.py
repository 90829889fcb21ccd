"""Types that are plain to see are those that torch's Meta kernels give."""

import pytest
import torch

from ltc.debug import metrics
from ltc.device import meta


def types_of(call) -> list:
    return [(tuple(r.shape), r.dtype) for r in call]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lists_of_equal_float_types_need_no_kernel(dtype):
    meta._known.clear()
    xs = [torch.ones(shape, dtype=dtype).to("ltc") for shape in ((3,), (2, 3), ())]
    ys = [torch.ones(shape, dtype=dtype).to("ltc") for shape in ((3,), (2, 3), ())]
    before = metrics.counter_value("MetaInference") or 0
    torch._foreach_mul_(xs, 0.5)
    torch._foreach_addcdiv_(xs, ys, ys, [0.1, 0.2, 0.3])
    results = [torch._foreach_add(xs, ys), torch._foreach_sqrt(xs), torch._foreach_div(xs, 2)]
    total = xs[1] / ys[1]
    assert (metrics.counter_value("MetaInference") or 0) == before
    for result in results:
        assert types_of(result) == types_of(xs)
    assert [tuple(r.cpu().shape) for r in results[0]] == [(3,), (2, 3), ()]
    assert total.cpu().shape == (2, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.ones(2, 3, device=d) + torch.ones(3, device=d),
        lambda d: torch.ones(3, device=d) * torch.ones(3, dtype=torch.float64, device=d),
        lambda d: torch.ones(3, dtype=torch.int64, device=d) / torch.full((3,), 2, device=d),
        lambda d: torch._foreach_add([torch.ones(3, device=d)], [torch.ones(1, device=d)])[0],
        lambda d: torch._foreach_mul([torch.ones(3, dtype=torch.int64, device=d)], 0.5)[0],
    ],
)
def test_whatever_promotes_or_broadcasts_is_asked_for(call, equal):
    equal(call("ltc"), call("cpu"))


def test_a_kernel_still_refuses_what_is_wrong():
    xs = [torch.ones(3, device="ltc")]
    with pytest.raises(RuntimeError):
        torch._foreach_add(xs, [torch.ones(3, device="ltc")] * 2)
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(3, device="ltc") + torch.ones(4, device="ltc")
