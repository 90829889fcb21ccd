"""Attention that is written out: the same results without scores; other patterns stay."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ltc.core.lazy_model as ltm
from ltc.backends.llvm import compiling
from ltc.ir import ops
from ltc.ir.graph import schedule


@pytest.fixture
def attentions(monkeypatch):
    """The attention nodes of every graph that is compiled, after the passes."""
    found = []
    prepared = compiling.prepared

    def remembered(graph):
        result = prepared(graph)
        found.extend(n for n in schedule(*result.outputs) if n.op.kind == "attention")
        return result

    monkeypatch.setattr(compiling, "prepared", remembered)
    monkeypatch.setenv("LTC_BACKEND", "llvm")
    return found


class Attention(nn.Module):
    """Heads of one product, as they are often written."""

    def __init__(self, attend, width=24, heads=3):
        super().__init__()
        self.attend, self.heads = attend, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        n, t, d = x.shape
        parts = [p.view(n, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).split(d, 2)]
        y = self.attend(*parts)
        return self.out(y.transpose(1, 2).reshape(n, t, d))


def causal(t, device):
    return torch.ones(t, t, dtype=torch.bool, device=device).tril().logical_not()


def scaled(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * (1 / math.sqrt(q.size(-1))), -1) @ v


def divided_and_masked(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(causal(q.size(-2), q.device), float("-inf"))
    return F.softmax(scores, dim=-1) @ v


def query_scaled_and_bias_added(q, k, v):
    bias = causal(q.size(-2), q.device) * -1e9
    return (q * 0.3 @ k.mT + bias).softmax(-1) @ v


def by_einsum(q, k, v):
    weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.3).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def without_scale(q, k, v):
    return torch.bmm(torch.bmm(q[:, 0], k[:, 0].mT).softmax(-1), v[:, 0]).unsqueeze(1) + q


FORMS = [scaled, divided_and_masked, query_scaled_and_bias_added, by_einsum, without_scale]


def trained(device, attend, dtype=torch.float64):
    torch.manual_seed(0)
    model = Attention(attend).to(dtype).to(device)
    x = torch.randn(2, 19, 24, dtype=dtype).to(device).requires_grad_()
    loss = model(x).square().sum()
    loss.backward()
    if device != "cpu":
        ltm.mark_step(wait=True)
    return [t.detach().cpu() for t in (loss, x.grad, *[p.grad for p in model.parameters()])]


@pytest.mark.parametrize("attend", FORMS)
def test_both_passes_are_recognised_and_equal_the_cpu(attentions, attend):
    on_ltc = trained("ltc", attend)
    assert [n.op for n in attentions] == [ops.ATTENTION, ops.ATTENTION_GRADIENT]
    for mine, theirs in zip(on_ltc, trained("cpu", attend)):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_forward_pass_alone_is_recognised(attentions):
    q, k, v = (torch.randn(2, 3, 20, 8) for _ in range(3))
    with torch.no_grad():
        made = divided_and_masked(*[x.to("ltc") for x in (q, k, v)]).cpu()
    assert [n.op for n in attentions] == [ops.ATTENTION]
    torch.testing.assert_close(made, divided_and_masked(q, k, v))


def test_a_row_without_a_score_is_not_a_number_as_softmax_has_it(attentions):
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True

    def attend(q, k, v):
        return (q @ k.mT).masked_fill(mask.to(q.device), -math.inf).softmax(-1) @ v

    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        made = attend(*[x.to("ltc")] * 3).cpu()
    assert attentions
    torch.testing.assert_close(made, attend(x, x, x), equal_nan=True)


def test_dropout_between_is_recognised_and_drops_the_same(attentions):
    def attend(read):
        torch.manual_seed(4)
        q = torch.ones(2, 3, 20, 8, dtype=torch.float64, device="ltc", requires_grad=True)
        k = torch.randn(2, 3, 20, 8, dtype=torch.float64).to("ltc").requires_grad_()
        weights = F.dropout((q @ k.mT * 0.3).softmax(-1), 0.4)
        total = (weights @ k).square().sum()
        if read:
            total = total + 0.0 * weights.sum()  # someone else reads the weights
        total.backward()
        del weights  # who holds them reads them
        return [t.detach().cpu() for t in (total, q.grad, k.grad)]

    written_out = attend(read=True)
    assert not attentions
    fused = attend(read=False)
    assert [n.op for n in attentions] == [ops.ATTENTION, ops.ATTENTION_GRADIENT]
    for mine, theirs in zip(fused, written_out):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def returned(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    returned.weights = weights
    return weights @ v


def summed(q, k, v):
    scores = q @ k.mT
    return scores.softmax(-1) @ v + scores.sum()


def over_the_other_dimension(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


def a_learned_bias(q, k, v):
    return (q @ k.mT + a_learned_bias.bias.to(q)).softmax(-1) @ v


@pytest.mark.parametrize("attend", [returned, summed, over_the_other_dimension, a_learned_bias])
def test_what_someone_reads_is_made(attentions, attend):
    a_learned_bias.bias = torch.zeros(19, 19, dtype=torch.float64, requires_grad=True)
    on_ltc = trained("ltc", attend)
    assert not attentions
    for mine, theirs in zip(on_ltc, trained("cpu", attend)):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def of_a_linear_layer(weights, q, v):
    """Its product has as many rows as all heads together."""
    return F.linear(weights, v.flatten()[: weights.shape[-1]].view(1, -1))


def of_all_heads_at_once(weights, q, v):
    return (weights.flatten(0, 2).mT @ q.flatten(0, 2)).sum() + weights @ v


def of_one_head_for_all(weights, q, v):
    return weights @ v[:1, :1]


def of_rows_in_pairs(weights, q, v):
    pairs = weights.unflatten(-2, (2, -1)).flatten(0, 2)
    return pairs @ v.flatten(0, 1).repeat_interleave(2, 0)


@pytest.mark.parametrize(
    "use", [of_a_linear_layer, of_all_heads_at_once, of_one_head_for_all, of_rows_in_pairs]
)
@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 3, 8, 6), (1, 1, 4, 4), (1, 6, 2, 2)], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_weights_that_are_used_otherwise_are_right(attentions, use, shape, backward):
    *batch, rows, columns = shape
    q, k, v = (torch.randn(*batch, n, 5, dtype=torch.float64) for n in (rows, columns, columns))

    def results(device):
        own = [x.to(device).requires_grad_(backward) for x in (q, k, v)]
        weights = (own[0] @ own[1].mT * 0.3).softmax(-1)
        result = use(weights, own[0], own[2])
        del weights  # who holds them reads them
        gradients = torch.autograd.grad(result.sin().sum(), own) if backward else []
        return [x.detach().cpu() for x in (result, *gradients)]

    for mine, theirs in zip(results("ltc"), results("cpu")):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
