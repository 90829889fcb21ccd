"""scaled_dot_product_attention on ltc: PyTorch's results, gradients, errors, and no scores kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import ltc.core.lazy_model as ltm
from ltc.backends.llvm import compiling
from ltc.debug import metrics

pytestmark = pytest.mark.also_native


def randn(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).to(device).requires_grad_()


def with_gradients(device, function, *operands):
    """The result of function(*operands), and the gradients of those that have one."""
    operands = [x.detach().to(device).requires_grad_(x.is_floating_point()) for x in operands]
    result = function(*operands)
    weights = torch.arange(result.numel(), dtype=result.dtype).sin().reshape(result.shape)
    wanted = [x for x in operands if x.requires_grad]
    return result, *torch.autograd.grad((result * weights.to(device)).sum(), wanted)


SHAPES = {
    "one matrix": ((5, 8), (7, 8), (7, 6)),
    "heads": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "broadcast": ((2, 3, 5, 8), (1, 7, 8), (7, 6)),
    "long": ((1, 2, 70, 20), (1, 2, 150, 20), (1, 2, 150, 20)),
    "empty batch": ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 6)),
    "no key": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 6)),
    "no query": ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
}


@pytest.mark.compared
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_and_its_gradients(device, name, causal):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)

    return with_gradients(device, attend, *[randn(*shape) for shape in SHAPES[name]])


ROUNDED_OFTEN = pytest.mark.native("calls that run at once round each bfloat16 between them")


@pytest.mark.compared
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, pytest.param(torch.bfloat16, marks=ROUNDED_OFTEN)],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "number"])
def test_a_mask_and_is_causal_leave_what_both_let_through(device, kind, lengths, dtype):
    mask = torch.rand(lengths) > 0.3
    mask[:, 0] = True
    mask = mask if kind == "bool" else torch.randn(lengths, dtype=dtype)
    shapes = [(2, 3, lengths[0], 8), *[(2, 3, lengths[1], 8)] * 2]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask.to(device), is_causal=True)

    return with_gradients(device, attend, *[randn(*shape, dtype=dtype) for shape in shapes])


@pytest.mark.compared
@pytest.mark.parametrize("case", ["dropout", "a mask with a gradient", "no batch"])
def test_a_mask_and_is_causal_are_refused_where_the_cpu_refuses_them(device, case, error_of):
    shape = (4, 8) if case == "no batch" else (1, 1, 4, 8)
    q, mask = randn(*shape, device=device), randn(4, 4, device=device)
    options = {"dropout_p": 0.5} if case == "dropout" else {}
    mask = mask if case == "a mask with a gradient" else mask.detach()
    return error_of(
        lambda: F.scaled_dot_product_attention(q, q, q, mask, is_causal=True, **options)
    )


MASKS = ((5, 7), (2, 1, 1, 7), (1, 3, 5, 7), (2, 3, 5, 7))


@pytest.mark.compared
@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", ["bool", "number"])
def test_masks_broadcast(device, kind, shape):
    mask = torch.rand(shape) > 0.4
    if len(shape) > 1 and shape[-2] > 2:
        mask[..., 2, :] = False  # a row of which no score counts
    if kind == "number":
        mask = torch.randn(shape, dtype=torch.float64)
    operands = [randn(*s) for s in SHAPES["heads"]]
    return with_gradients(device, F.scaled_dot_product_attention, *operands, mask)


@pytest.mark.compared
@pytest.mark.parametrize("mask", [None, (6, 5, 7), (2, 1, 5, 7)])
def test_heads_that_share_a_key(device, mask):
    def attend(q, k, v, *rest):
        return F.scaled_dot_product_attention(q, k, v, *rest, enable_gqa=True)

    operands = [randn(2, 6, 5, 8), randn(2, 3, 7, 8), randn(2, 3, 7, 4)]
    return with_gradients(device, attend, *operands, *([] if mask is None else [randn(*mask)]))


@pytest.mark.compared
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(device, dtype):
    operands = [randn(2, 3, 9, 8).to(dtype) for _ in range(3)]
    return with_gradients(device, F.scaled_dot_product_attention, *operands)


@pytest.mark.compared
def test_operands_that_are_slices_of_one_product(device):
    def attend(x):
        parts = [p.reshape(2, 9, 3, 8).transpose(1, 2) for p in x.split(24, dim=2)]
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return y.transpose(1, 2).reshape(2, 9, 24)

    return with_gradients(device, attend, randn(2, 9, 72))


def test_training_attention_runs_without_python_and_keeps_no_scores(monkeypatch):
    monkeypatch.setenv("LTC_BACKEND", "llvm")
    plans, plan_of = [], compiling.plan_of
    monkeypatch.setattr(compiling, "plan_of", lambda *a: plans.append(plan_of(*a)) or plans[-1])
    x = torch.randn(1, 2, 2001, 8, device="ltc", requires_grad=True)

    def step():
        (g,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).square().sum(), x)
        ltm.mark_step(wait=True)
        return g

    step()
    with metrics.counted() as grown:
        step()
    assert not grown.get("extern.python", 0) and not grown.get("llvm.compiled", 0)
    one_matrix_of_scores = 4 * 2 * 2001 * 2001
    assert max(plan[0].block for plan in plans) < one_matrix_of_scores / 4


def test_dropout_repeats_with_the_seed_and_keeps_the_share():
    x = torch.zeros(1, 1, 64, 8, device="ltc")
    value = torch.eye(64, device="ltc").reshape(1, 1, 64, 64)

    def weights():
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(x, x, value, dropout_p=0.25).cpu() * 64

    first = weights()
    assert torch.equal(first, weights())
    assert abs((first != 0).float().mean() - 0.75) < 0.03  # four standard deviations
    assert torch.allclose(first[first != 0], torch.tensor(4 / 3))


def test_the_gradient_drops_what_the_result_dropped():
    torch.manual_seed(0)
    q, k, v = (randn(1, 2, 40, 8, device="ltc") for _ in range(3))
    eye = torch.eye(40, dtype=torch.float64, device="ltc").expand(1, 2, 40, 40)
    torch.manual_seed(5)
    dropped = F.scaled_dot_product_attention(q, k, eye, dropout_p=0.4)
    torch.manual_seed(5)
    result = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    kept = (dropped != 0).to(torch.float64).detach() / 0.6
    expected = (torch.softmax(q @ k.mT / 8**0.5, -1) * kept) @ v
    weights = torch.randn_like(expected)
    made = torch.autograd.grad((result * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for x, y in zip((result, *made), (expected, *wanted)):
        torch.testing.assert_close(x.cpu(), y.cpu(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_gradients_are_those_of_the_formula(dropout):
    operands = [randn(1, 3, 4, device="ltc") for _ in range(3)]

    def attend(*operands):
        torch.manual_seed(2)
        return F.scaled_dot_product_attention(*operands, dropout_p=dropout)

    assert torch.autograd.gradgradcheck(attend, operands, atol=1e-4)


@pytest.mark.compared
def test_function_transforms(device):
    x = torch.randn(3, 2, 5, 8, dtype=torch.float64).to(device)

    def loss(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).square().sum()

    tangent = torch.ones_like(x)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's fused attention has no forward mode
        return [
            torch.func.grad(loss)(x), torch.func.vmap(torch.func.grad(loss))(x),
            torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(x),
            *torch.func.jvp(loss, (x,), (tangent,)), torch.func.hessian(loss)(x[0, 0]),
        ]  # fmt: skip


@pytest.mark.compared
@pytest.mark.parametrize("where", ["the mask", "the keys"])
def test_a_score_that_is_infinite_leaves_no_number_in_its_row(device, where):
    """Nor in any gradient of a value that it was made of."""
    key, mask = torch.randn(1, 5, 4), torch.randn(5, 5)
    if where == "the mask":
        mask[0, 1] = mask[3, 4] = torch.inf
    else:
        key[0, 2] = torch.tensor([torch.inf, 0.0, 0.0, 0.0])
    query, value = torch.randn(1, 5, 4).abs().to(device), randn(1, 5, 4, device=device)
    attended = F.scaled_dot_product_attention(
        query.double(), key.double().to(device), value, mask.double().to(device)
    )
    attended.sum().backward()
    return attended, value.grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_the_same_dropout(reentrant):
    x = randn(2, 3, 20, 8, device="ltc")

    def gradient(wrapped):
        torch.manual_seed(1)
        result = wrapped(x)
        x.grad = None
        result.square().sum().backward()
        return x.grad.cpu()

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)

    kept = gradient(attend)
    again = gradient(lambda x: checkpoint(attend, x, use_reentrant=reentrant))
    torch.testing.assert_close(again, kept, rtol=1e-12, atol=1e-12)


def test_autocast_computes_in_its_dtype():
    x = torch.randn(2, 3, 5, 8, device="ltc", requires_grad=True)
    with torch.autocast("ltc", dtype=torch.bfloat16):
        result = F.scaled_dot_product_attention(x, x, x)
    assert result.dtype == torch.bfloat16
    result.float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_wrong_calls_raise_torchs_errors(equal):
    def error_on(device, *shapes, **named):
        operands = [torch.ones(shape, device=device) for shape in shapes]
        if named.pop("mask", False):
            named["attn_mask"] = torch.ones(5, 7, device=device)
        with pytest.raises(RuntimeError) as caught:
            F.scaled_dot_product_attention(*operands, **named).cpu()
        return str(caught.value)

    for shapes, named in (
        (((8,), (8,), (8,)), {}),
        (((2, 5, 8), (2, 7, 8), (2, 7, 8)), {"mask": True, "is_causal": True}),
        (((2, 5, 8), (2, 7, 8), (2, 7, 8)), {"dropout_p": 1.5}),
    ):
        equal(error_on("ltc", *shapes, **dict(named)), error_on("cpu", *shapes, **dict(named)))


@pytest.mark.compared
@pytest.mark.parametrize("weights", [False, True])
def test_multi_head_attention_trains(device, weights):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(24, 3, batch_first=True).double().to(device)
    x, y = (randn(2, n, 24).to(device) for n in (6, 9))
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 5:] = True
    result, _ = module(x, y, y, key_padding_mask=padding.to(device), need_weights=weights)
    result.square().sum().backward()
    return result, *[p.grad for p in module.parameters()]


@pytest.mark.compared
@pytest.mark.parametrize("training", [False, True])
def test_a_transformer_with_padding_masks(device, training):
    torch.manual_seed(0)
    model = nn.Transformer(
        16, 2, 2, 2, dim_feedforward=32, dropout=0.0, batch_first=True
    ).double().to(device).train(training)  # fmt: skip
    source, target = torch.randn(2, 7, 16).double(), torch.randn(2, 5, 16).double()
    source_padding = torch.zeros(2, 7, dtype=torch.bool)
    source_padding[1, 4:] = True
    target_padding = torch.zeros(2, 5, dtype=torch.bool)
    target_padding[0, 3:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5).isinf()
    named = {
        "tgt_mask": causal, "src_key_padding_mask": source_padding,
        "tgt_key_padding_mask": target_padding, "memory_key_padding_mask": source_padding,
    }  # fmt: skip
    with torch.set_grad_enabled(training):
        result = model(
            source.to(device), target.to(device), **{k: m.to(device) for k, m in named.items()}
        )
    if not training:
        return [result]
    result.square().sum().backward()
    return result, *[p.grad for p in model.parameters()]


@pytest.mark.skipif("2.12" <= torch.__version__ < "2.13", reason="torch 2.12 gives zeros")
@pytest.mark.compared
def test_queries_of_no_numbers_attend_to_all_keys_alike(device):
    """Every score is 0: no scale of 1 / sqrt(0) may make NaN of it."""
    query, key = torch.ones(1, 2, 3, 0).to(device), torch.ones(1, 2, 5, 0).to(device)
    value = torch.randn(1, 2, 5, 7).to(device).requires_grad_()
    y = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    return y, torch.autograd.grad(y.sin().sum(), value)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 divides by the number of heads")
@pytest.mark.parametrize("query, key", [((2, 0, 3, 4), (2, 0, 5, 4)), ((2, 0, 3, 4), (2, 1, 5, 4))])
@pytest.mark.compared
def test_no_heads_attend_to_nothing(device, query, key):
    query = torch.ones(query).to(device).requires_grad_()
    key = torch.ones(key).to(device).requires_grad_()
    y = F.scaled_dot_product_attention(query, key, key, is_causal=True)
    return y, *torch.autograd.grad(y.sum(), (query, key))
