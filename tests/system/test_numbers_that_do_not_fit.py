"""Numbers that the dtype of a result cannot hold are refused as on the CPU."""

import math

import pytest
import torch
from torch.nn import functional as F

import ltc.core.lazy_model as ltm

pytestmark = pytest.mark.also_native

CALLS = {
    "fill_": lambda x, n: x.fill_(n),
    "full": lambda x, n: torch.full((3,), n, dtype=x.dtype, device=x.device),
    "full_like": lambda x, n: torch.full_like(x, n),
    "new_full": lambda x, n: x.new_full((3,), n),
    "masked_fill": lambda x, n: x.masked_fill(x > 2, n),
    "masked_fill_": lambda x, n: x.masked_fill_(x > 2, n),
    "index_fill": lambda x, n: x.index_fill(0, torch.tensor([1], device=x.device), n),
    "scatter": lambda x, n: x.scatter(0, torch.tensor([1], device=x.device), n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "clamp": lambda x, n: x.clamp(-2, n),
    "clamp_min": lambda x, n: x.clamp_min(n),
    "clamp_max_": lambda x, n: x.clamp_max_(n),
    "hardtanh": lambda x, n: F.hardtanh(x, min(n, -2), max(n, 2)),
    "threshold": lambda x, n: F.threshold(x, 2, n),
    "a_slice": lambda x, n: x[1:].fill_(n),
    "an_item": lambda x, n: (x.__setitem__(0, n), x),
}
NUMBERS = {
    torch.float16: (7, 65504.0, 1e9, -1e9, math.inf, -math.inf, 7.5),
    torch.bfloat16: (7, 1e9, -1e39, -math.inf, math.nan),
    torch.float32: (7, -1e38, 1e39, math.inf),
    torch.int8: (7, 127, -128, 300, -129, 2**40),
    torch.int32: (7, 2**31 - 1, -(2**31), 2**31),
}


def outcome_of(call):
    """What it returns; where it is refused, in which words."""
    try:
        return call()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.compared
def test_a_number_is_taken_or_refused_as_on_the_cpu(device, call):
    found = []
    for dtype, numbers in NUMBERS.items():
        x = torch.arange(1, 4, dtype=dtype).to(device)
        for number in numbers:
            found.append(outcome_of(lambda x=x, number=number: CALLS[call](x.clone(), number)))
            if device != "cpu":
                ltm.mark_step()
    return found


@pytest.mark.compared
def test_a_step_goes_on_behind_a_number_that_was_refused(device):
    x, found = torch.ones(3, dtype=torch.float16).to(device), []
    for number in (3, 4, 1e9, 5, -1e9, 6):
        y = x * 2
        taken = outcome_of(lambda y=y, number=number: y.masked_fill_(y > 1, number).shape)
        found += [taken, y]
        x = y / 2
        if device != "cpu":
            ltm.mark_step()
    return found


@pytest.mark.compared
@pytest.mark.parametrize("dtype", [*NUMBERS, torch.float64, torch.bool, torch.complex64], ids=str)
def test_a_number_is_copied_as_a_tensor_of_it_is(device, dtype):
    x = torch.ones(3, dtype=dtype).to(device)
    copies = [x.clone().copy_(number) for number in (7, True, 300, 0.1, -2.5)]
    return *copies, x[1:].copy_(0), x
