"""Writes through views made by `expand`: in a forward, in its gradients, and those that are refused."""

import pytest
import torch
from torch.autograd import functional
from torch.utils.checkpoint import checkpoint

import ltc.core.lazy_model as ltm

pytestmark = pytest.mark.also_native


def ramp(*shape: int, device: str) -> torch.Tensor:
    """Distinct float64 values from 1 upwards."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape).double() / 7 + 1).to(device)


VIEWS_OF_THE_WHOLE = {
    "expand": lambda x: x.expand(2, 3),
    "expand_as": lambda x: x.expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, 3)),
    "with_a_dimension": lambda x: x[None].expand(1, 2, 3),
    "rows": lambda x: x.expand_as(x)[1:3],
}
# Each element of the base at most once, though the expansion shows it several times.
PARTS_OF_A_REPETITION = {
    "select": lambda x: x.expand(4, 2, 3)[2],
    "slice": lambda x: x.broadcast_to(4, 2, 3)[1:2],
    "middle": lambda x: x[:, None].expand(2, 4, 3)[:, 1],
    "last": lambda x: x.view(2, 3, 1).expand(2, 3, 5)[..., 3],
    "row": lambda x: x.expand(2, 2, 3)[1, 0],
    "of_a_row": lambda x: x[:1].expand(4, 3)[2],
    "diagonal": lambda x: x.expand(2, 2, 3)[1].diagonal(),
    "transposed": lambda x: x.t().expand(4, 3, 2)[1:2],
    "twice": lambda x: x.expand(4, 2, 3)[3].expand(3, 2, 3)[2].t(),
}
VIEWS = {**VIEWS_OF_THE_WHOLE, **PARTS_OF_A_REPETITION}
WRITES = {
    "mul_": lambda y: y.mul_(3),
    "sin_": lambda y: y.sin_(),
    "copy_": lambda y: y.copy_(y.detach() + 1),
}
OVERLAPPING = {
    "whole": lambda x: x.expand(4, 2, 3),
    "two_of_four": lambda x: x.expand(4, 2, 3)[1:3],
    "columns": lambda x: x.expand(4, 2, 3)[..., 1],
    "transposed": lambda x: x.expand(4, 2, 3).transpose(0, 2),
}
CALLS = {
    "called": lambda f, x: f(x),
    "checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
}


@pytest.mark.parametrize("view", PARTS_OF_A_REPETITION)
@pytest.mark.parametrize("marks", [False, True], ids=["", "marked"])
@pytest.mark.compared
def test_a_write_to_one_repetition_reaches_the_base(device, view, marks):
    x = ramp(2, 3, device=device)
    shown, other = PARTS_OF_A_REPETITION[view](x), x.expand(2, 2, 3)
    if marks:
        ltm.mark_step()
    shown.mul_(-0.0).add_(ramp(*shown.shape, device=device))
    return x, shown, other


@pytest.mark.compared
def test_an_assignment_to_one_repetition_reaches_the_base(device):
    x = ramp(1, 3, device=device)
    x.expand(4, 3)[2] = 5.0
    x.expand(4, 3)[1, 2] = 6.0
    return x


@pytest.mark.compared
def test_a_write_to_none_of_the_repetitions_changes_nothing(device):
    x = ramp(1, 3, device=device)
    x.expand(0, 3).add_(1)
    x.expand(4, 3)[2:2].add_(1)
    return x


@pytest.mark.compared
def test_repetitions_of_changing_sizes_are_written_to(device):
    results = []
    for n in (3, 4, 5, 7, 4):
        x = ramp(n, device=device).requires_grad_()
        y = x * 1
        y.expand(n - 1, n)[1].sin_()
        y[:, None].expand(n, 2)[:, 1].mul_(2)
        (y * y).sum().backward()
        results += [y.detach(), x.grad]
        if device != "cpu":
            ltm.mark_step()
    return results


@pytest.mark.parametrize("view", OVERLAPPING)
@pytest.mark.compared
def test_a_write_to_several_repetitions_is_refused(device, error_of, view):
    x = ramp(2, 3, device=device)
    return error_of(lambda: OVERLAPPING[view](x).add_(1))[:60], x


def test_a_flat_view_of_repetitions_refuses_a_write():
    flat = ramp(3, device="ltc").expand(2, 3).view(6)  # which the CPU does not even make
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        flat.add_(1)


def test_a_write_to_the_real_parts_of_a_repetition_is_refused():
    x = torch.zeros(3, dtype=torch.complex64, device="ltc")
    with pytest.raises(RuntimeError, match="clone"):
        x.expand(2, 3)[1].real.add_(1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.compared
def test_gradients_go_back_through_writes_to_an_expanded_view(device, view, call):
    def f(x, write):
        y = x.clone()
        write(VIEWS[view](y))
        return (y * y).sum()

    gradients = []
    for write in WRITES.values():
        x = ramp(2, 3, device=device).requires_grad_()
        CALLS[call](lambda x, write=write: f(x, write), x).backward()
        gradients.append(x.grad)
    return gradients


def _with_a_row_written(x):
    y = x.clone()
    y[0] = x[1] * 5
    return y * x


def _with_a_repetition_written(x):
    y = x.clone()
    y.expand(4, 3)[1].sin_()
    return y * x


@pytest.mark.parametrize("f", [_with_a_row_written, _with_a_repetition_written])
@pytest.mark.compared
def test_batched_gradients_go_back_through_writes(device, f):
    x = ramp(3, device=device).requires_grad_()
    eye = torch.eye(3, dtype=x.dtype, device=device)
    return (
        functional.jacobian(f, x, vectorize=True),
        functional.hessian(lambda x: f(x).pow(2).sum(), x, vectorize=True),
        torch.autograd.grad(f(x), x, eye, is_grads_batched=True)[0],
        torch.autograd.gradcheck(f, (x,), check_batched_grad=True),
        torch.autograd.gradgradcheck(f, (x,)),
    )


def _scaled_through_views(gradient):
    gradient = gradient.clone()
    gradient[None].expand(1, 2, 3)[0, 0] = 0.0
    gradient.expand(4, 2, 3)[2].mul_(3)
    return gradient


class _ScaledThroughViews(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return _scaled_through_views(gradient)


@pytest.mark.compared
def test_a_hook_and_a_function_write_to_expanded_views(device):
    x, y = (ramp(2, 3, device=device).requires_grad_() for _ in "xy")
    hooked = x * 2
    hooked.register_hook(_scaled_through_views)
    ((hooked * hooked).sum() + (_ScaledThroughViews.apply(y) ** 2).sum()).backward()
    return x.grad, y.grad


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(2, 3)


def _hook_of_expanded_gradients(gradient):
    return gradient.sum().expand(2, 3)


@pytest.mark.compared
def test_a_gradient_that_a_hook_or_a_function_expands_can_be_written_to(device):
    x, y, z = (ramp(2, 3, device=device).requires_grad_() for _ in "xyz")
    y.register_hook(_hook_of_expanded_gradients)
    z.register_post_accumulate_grad_hook(lambda z: z.grad.mul_(5).numel() and None)
    (_Sum.apply(x) + (y * y).sum() + _Sum.apply(z)).backward()
    x.grad[0] = 7
    y.grad.mul_(2)[1].add_(1)
    return x.grad, y.grad, z.grad


@pytest.mark.compared
def test_a_checkpoints_backward_adds_to_an_expanded_gradient(device):
    x, y = (ramp(2, 3, device=device).requires_grad_() for _ in "xy")
    inner = checkpoint(lambda y: (y * x).sum(), y, use_reentrant=True)
    (inner + _Sum.apply(x)).backward()
    return x.grad, y.grad


@pytest.mark.compared
def test_a_sums_gradient_of_second_order_is_right(device):
    x = ramp(2, 3, device=device).requires_grad_()
    (first,) = torch.autograd.grad((x**3).sum(0).pow(2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first, second


# --- what a mask or an index says is written to repetitions, too -----------------------------------

REPETITIONS = {
    "rows": (lambda x: x[:1].expand(4, 3), (1, 3)),
    "columns": (lambda x: x.expand(4, 3), (4, 1)),
    "one": (lambda x: x.expand(4, 3), ()),
    "transposed": (lambda x: x.expand(3, 4).t(), (1, 4)),
    "windows": (lambda x: x.unfold(0, 3, 1), (6,)),
    "strides": (lambda x: x.as_strided((4, 3), (1, 1)), (6,)),
    "part of a repetition": (lambda x: x.expand(6, 3)[1:5], (1, 3)),
}


def _index(x, *numbers):
    return torch.tensor(numbers).to(x.device)


def _mask(x, *numbers):
    return torch.tensor(numbers, dtype=torch.bool).to(x.device)


def _rows(x, count=4):
    return ramp(count, 3, device=str(x.device))


FILLS = {
    "masked_fill_": lambda x: x.masked_fill_(_mask(x, 1, 0, 1), 5.0),
    "masked_fill_ of rows": lambda x: x.masked_fill_(_mask(x, 0, 1, 0, 0)[:, None], 5.0),
    "masked_fill_ with a tensor": lambda x: x.masked_fill_(_rows(x) > 1.5, _rows(x)[0, 0]),
    "index_fill_": lambda x: x.index_fill_(0, _index(x, 0, -2), 5.0),
    "index_fill_ of columns": lambda x: x.index_fill_(1, _index(x, 1), 5.0),
    "index_put_": lambda x: x.index_put_((_index(x, 1, 2),), _rows(x, 2)),
    "index_put_ added": lambda x: x.index_put_((_index(x, 1, 2),), _rows(x, 2), accumulate=True),
    "an assigned mask": lambda x: x.__setitem__(_rows(x) > 1.5, 5.0),
    "assigned rows": lambda x: x.__setitem__(_mask(x, 1, 0, 0, 1), _rows(x, 2)),
    "an assigned index": lambda x: x.__setitem__(_index(x, 1, 2), 5.0),
    "fill_": lambda x: x.fill_(5.0),
    "zero_": lambda x: x.zero_(),
    "tril_": lambda x: x.tril_(),
    "masked_scatter_": lambda x: x.masked_scatter_(_rows(x) > 1.5, _rows(x)),
    "scatter_": lambda x: x.scatter_(0, _index(x, 0, 1, 1)[None], _rows(x, 1)),
    "scatter_add_": lambda x: x.scatter_add_(0, _index(x, 0, 1, 1)[None], _rows(x, 1)),
    "index_add_": lambda x: x.index_add_(0, _index(x, 1, 2), _rows(x, 2)),
    "index_copy_": lambda x: x.index_copy_(0, _index(x, 1, 2), _rows(x, 2)),
    "put_": lambda x: x.put_(_index(x, 1, 2), _rows(x, 1)[0, :2]),
}


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("marks", [False, True], ids=["", "marked"])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("view", REPETITIONS)
@pytest.mark.compared
def test_a_fill_of_repetitions_is_what_the_cpu_makes_of_it(device, view, fill, marks):
    """Thrice: it is refused where the CPU refuses it, in its words."""
    found = []
    for _ in range(3):
        make, shape = REPETITIONS[view]
        x = ramp(*shape, device=device)
        other, shown = x * 2, make(x)
        if marks:
            ltm.mark_step()
        try:
            FILLS[fill](shown)
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
        found += [x, shown, other]
        if marks:
            ltm.mark_step()
    return found


def test_the_cpus_warning_of_a_fill_is_given():
    with pytest.warns(UserWarning, match="masked_fill_ on expanded tensors is deprecated"):
        ramp(1, 3, device="ltc").expand(4, 3).masked_fill_(torch.ones(3).bool().to("ltc"), 1)


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("fill", ["masked_fill_", "index_fill_ of columns", "fill_"])
@pytest.mark.compared
def test_no_gradient_goes_back_through_a_fill_of_repetitions(device, fill, error_of):
    """Its backward writes to a gradient that is expanded alike."""
    x = ramp(1, 3, device=device).requires_grad_()
    y = x * 1
    FILLS[fill](y.expand(4, 3))
    return y.detach(), error_of((y * y).sum().backward)[:60]
