"""What has hundreds of operands: stacks of time steps, norms of all gradients, lists put together."""

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics

MANY = 300


@pytest.fixture(autouse=True)
def compiled():
    with config.override(LTC_TIER="native"):
        yield


def steps_of(x):
    return [(row * (1 + k % 5)).sin() for k, row in enumerate(x.unbind(0))]


PROGRAMS = {
    "stack": lambda x: torch.stack(steps_of(x)),
    "stack_last": lambda x: torch.stack(steps_of(x), -1),
    "cat": lambda x: torch.cat(steps_of(x)),
    "cat_inner": lambda x: torch.cat(steps_of(x), 1),
    "cat_of_other_lengths": lambda x: torch.cat([s[: k % 3] for k, s in enumerate(steps_of(x))]),
    "norms": lambda x: torch.stack([s.norm() for s in steps_of(x)]).softmax(0),
    "rows": lambda x: torch.cat([row[:1] for row in x]).sum(0),
    "hstack": lambda x: torch.hstack(steps_of(x)) @ torch.ones(MANY * 3, 2, device=x.device),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_values_and_gradients_are_those_of_the_cpu(program):
    found = {}
    for device in ("cpu", "ltc"):
        x = torch.randn(MANY, 2, 3, generator=torch.Generator().manual_seed(0)).to(device)
        y = program(x.requires_grad_())
        y.square().sum().backward()
        found[device] = y.detach().cpu(), x.grad.cpu()
    torch.testing.assert_close(found["ltc"], found["cpu"], rtol=1e-5, atol=1e-5)


def test_the_norm_of_many_gradients_is_clipped():
    found = {}
    for device in ("cpu", "ltc"):
        source = torch.Generator().manual_seed(0)
        parameters = [torch.randn(5, generator=source).to(device) for _ in range(MANY)]
        for p in parameters:
            p.grad = p * 2
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        found[device] = [norm.cpu(), *[p.grad.cpu() for p in parameters]]
    torch.testing.assert_close(found["ltc"], found["cpu"])


def test_ten_times_as_many_parts_compile_no_more_kernels_than_a_few():
    def compiled(parts):
        rows = [torch.ones(8, device="ltc") for _ in range(parts)]
        ltm.mark_step()
        with metrics.counted() as grown:
            (torch.stack([row.exp() for row in rows]) + parts).cpu()
        return grown["llvm.compiled"]

    few = compiled(30)
    assert compiled(MANY) <= few + 6
