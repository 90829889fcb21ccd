"""F.linear on ltc: one recorded call each way, with PyTorch's results, gradients and errors."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from tests.recorders import forget_paths

pytestmark = pytest.mark.also_native

SHAPES = ((4,), (3, 4), (2, 3, 4), (2, 2, 3, 4), (0, 4), (2, 0, 4), (3, 0))


def operands(shape, dtype, device):
    torch.manual_seed(0)
    sizes = shape, (5, shape[-1]), (5,)
    return [torch.randn(n, dtype=dtype).to(device).detach().requires_grad_() for n in sizes]


def results(device, shape, dtype, count):
    given = operands(shape, dtype, device)[:count]
    made = F.linear(*given)
    weights = torch.arange(made.numel(), dtype=dtype).sin().reshape(made.shape).to(device)
    return made, *torch.autograd.grad((made * weights).sum(), given)


@pytest.mark.compared
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients(device, shape, dtype, count):
    return results(device, shape, dtype, count)


@pytest.mark.parametrize("tier", ["op_by_op", "auto"])
@pytest.mark.parametrize("shape", SHAPES)
def test_on_other_tiers(shape, tier):
    with config.override(LTC_TIER=tier, LTC_NUM_DEVICES=1):
        made = results("ltc", shape, torch.float64, 3)
    for a, b in zip(made, results("cpu", shape, torch.float64, 3), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-12, atol=1e-12)


@pytest.mark.native("it counts the calls that are recorded")
def test_each_way_is_one_call():
    x, weight, bias = operands((2, 3, 4), torch.float32, "ltc")
    gradient = torch.ones(2, 3, 5).to("ltc")
    ltm.mark_step(wait=True)
    forget_paths()  # other tests have recorded the same
    with metrics.counted() as grown:
        made = F.linear(x, weight, bias)
        assert grown["RecordedEntries"] == 4  # three inputs
        torch.autograd.grad(made, (x, weight, bias), gradient)
        assert grown["RecordedEntries"] == 6  # one input
    ltm.mark_step()


def test_gradients_of_gradients():
    given = operands((2, 3, 4), torch.float64, "ltc")
    assert torch.autograd.gradcheck(F.linear, given)
    assert torch.autograd.gradgradcheck(F.linear, given)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some(wanted):
    made = []
    for device in ("cpu", "ltc"):
        given = operands((2, 3, 4), torch.float64, device)
        for place, x in enumerate(given):
            x.requires_grad_(place in wanted)
        F.linear(*given).sum().backward()
        made.append([given[place].grad.cpu() for place in wanted])
        assert all(x.grad is None for place, x in enumerate(given) if place not in wanted)
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b)


def layer(weight, x):
    return F.linear(x, weight).tanh()


def test_batches_of_gradients_run_together():
    """Neither torch's loop over a batch, which it warns of, nor a missing rule."""
    weight, x = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    made = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("cpu", "ltc"):
            w, rows = weight.to(device).requires_grad_(), x.to(device)
            each = vmap(grad(lambda w, x: layer(w, x).sum()), (None, 0))(w, rows)
            jacobian = torch.autograd.functional.jacobian(
                lambda w, rows=rows: layer(w, rows), w, vectorize=True
            )
            made.append((each.cpu(), jacobian.cpu()))
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b)


def test_forward_mode():
    weight, x = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    made = [
        [part.cpu() for part in jvp(layer, (w, rows), (w, rows))]
        for w, rows in ((weight, x), (weight.to("ltc"), x.to("ltc")))
    ]
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b)


def test_a_dispatch_mode_sees_the_calls_that_it_sees_on_the_cpu():
    seen = {}

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    for device in ("cpu", "ltc"):
        x, weight, bias = operands((3, 4), torch.float32, device)
        names = seen[device] = []
        with Seen():
            F.linear(x, weight, bias)
    assert seen["ltc"] == seen["cpu"] and seen["cpu"]


@pytest.mark.parametrize(
    "sizes", [((3, 5), (5, 4)), ((3, 4), (5, 4), (6,)), ((), (5, 4)), ((3, 4), (4,))]
)
def test_what_does_not_fit_is_as_on_the_cpu(sizes):
    made = []
    for device in ("cpu", "ltc"):
        try:
            given = [torch.arange(float(torch.Size(n).numel())).reshape(n) for n in sizes]
            made.append(F.linear(*[x.to(device) for x in given]).tolist())
        except RuntimeError as error:
            made.append(str(error))
    assert made[0] == made[1]
