"""Networks drawn at random are right on ltc, and a planted fault is found.

Every run draws new ones. A failure names its seed: scripts/compare/random_networks.py shrinks it.
"""

import random

import pytest
import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm
from tests.drawn import TIMES
from tests.networks.blocks import BLOCKS, copied_into
from tests.networks.compose import REFUSALS, drawn_network
from tests.networks.drawing import Drawing
from tests.networks.expressions import WRITES
from tests.networks.judge import judged
from tests.networks.network import Leaf, Network, Step
from tests.networks.repetition import COMPILED, IMMEDIATE, SYMBOLIC, counted_by_tier
from tests.random_networks import smallest, tried
from tests.recorders import process_of_one_device

BATCHES, REPEATED_BATCHES, IN_A_BATCH = 6, 3, 10
FIRST = random.SystemRandom().randrange(2**40)


@pytest.mark.parametrize("batch", range(BATCHES * TIMES))
def test_random_networks_are_right(batch):
    """New seeds in every run: their names are in the message alone, so that runs compare."""
    fail_where_one_is_wrong(batch, "")


@pytest.mark.parametrize("time", range(TIMES))
def test_networks_that_are_repeated_are_right_on_every_tier(time, monkeypatch):
    """All of them pass through every tier; of ten alone, one time in twenty no sizes become symbols."""
    monkeypatch.setenv("NETWORK_RUNS", "repeated")
    with process_of_one_device(LTC_TIER="auto"), counted_by_tier() as runs:
        for batch in range(time * REPEATED_BATCHES, (time + 1) * REPEATED_BATCHES):
            fail_where_one_is_wrong(batch, "--tier auto --runs repeated ")
    assert min(runs[IMMEDIATE], runs[COMPILED], runs[SYMBOLIC]) > 0, runs


def fail_where_one_is_wrong(batch: int, options: str) -> None:
    for seed in range(FIRST + batch * IN_A_BATCH, FIRST + (batch + 1) * IN_A_BATCH):
        network, verdict = tried(seed)
        if str(verdict):
            pytest.fail(
                f"network {seed}, run {verdict.run}: {verdict}\n"
                f"python scripts/compare/random_networks.py {options}--seed {seed} --count 1 "
                f"shrinks it\n{network.function()}"
            )


# --- what was found, in its smallest form ---------------------------------------------------------


@pytest.mark.compared
def test_a_first_layers_batch_norm_has_gradients(device):
    x, weight = torch.randn(6, 3).to(device), torch.randn(3).to(device).requires_grad_()
    F.batch_norm(x, None, None, weight, training=True).sin().sum().backward()
    return weight.grad


@pytest.mark.compared
def test_a_comparison_of_sorted_numbers_is_read_twice(device):
    """The sort gives two tensors at once, which have no size."""
    x = torch.randn(2, 6, 3, 65).to(device).requires_grad_()
    least = torch.randn(1, 1, 1, 1).to(device).requires_grad_()
    (torch.maximum(least, x.sort(3).values) * 2).topk(4, 1).values.sum().backward()
    return x.grad, least.grad


@pytest.mark.compared
def test_what_each_reader_computes_is_found_in_a_kernel_that_sums_were_joined_to(device):
    """Its index in flattened rows is one position, which the sums' variables split again."""
    x = torch.randn(2, 5, 5, 5).to(torch.bfloat16).to(device).requires_grad_()
    weights = torch.randn(10, 5, 5).to(torch.bfloat16).to(device)
    loss = (F.normalize(x.log_softmax(-2).flatten(0, 1), dim=-1) * weights).sum()
    loss.backward()
    return loss, x.grad


@pytest.mark.compared
@pytest.mark.parametrize("correction", [0, 1])
def test_a_sum_that_is_made_of_another_waits_for_all_of_it(correction, device):
    """The deviation from a mean over samples of what a kernel makes row by row."""
    x = torch.randn(3, 8, 3, dtype=torch.float64).to(device)
    deviation, mean = torch.std_mean(x.softmax(-1), 0, keepdim=True, correction=correction)
    return (deviation + mean).softmax(2)


# --- the generator, the judge and the shrinker themselves -----------------------------------------


def softmax_of_a_sum() -> Network:
    """Five steps, of which the softmax will be made wrong, and a gradient through it."""
    leaves = (Leaf("p0", "parameter", (3, 5), 1), Leaf("x1", "input", (3, 5), 2))
    steps = (
        Step("v0", "{0} + {1}", ("p0", "x1")), Step("v1", "{0}.tanh()", ("v0",)),
        Step("v2", "{0}.softmax({d})", ("v1",), (("d", 1),)),
        Step("v3", "{0}.permute({order})", ("v2",), (("order", (1, 0)),)),
        Step("v4", "{0}.square().sum()", ("v3",)),
    )  # fmt: skip
    return Network(leaves, steps, ("v3",), ("v4",), frozenset({"v1"}), threads=2)


@pytest.fixture
def wrong_softmax(monkeypatch):
    """Of tensors on ltc, a softmax that is off by a thousandth."""
    softmax = torch.Tensor.softmax

    def wrong(x, dim):
        return softmax(x, dim) * (1.001 if x.device.type == "ltc" else 1)

    monkeypatch.setattr(torch.Tensor, "softmax", wrong)


def test_a_right_network_is_judged_strictly():
    verdict = judged(softmax_of_a_sum())
    assert (str(verdict), verdict.strict, verdict.widened, verdict.unjudged) == ("", 2, 0, 0)


def test_a_wrong_network_is_found_and_shrunk_to_the_wrong_step(wrong_softmax):
    network = softmax_of_a_sum()
    verdict = judged(network)
    assert "float64" in verdict.wrong
    least = smallest(network, verdict)
    assert "softmax" in least.function()
    assert len(least.steps) <= 2 and not least.marks and least.threads == 1
    assert judged(least).wrong


def test_what_raises_on_ltc_alone_is_a_failure(monkeypatch):
    softmax = torch.Tensor.softmax

    def refused(x, dim):
        if x.device.type == "ltc":
            raise RuntimeError("not today")
        return softmax(x, dim)

    monkeypatch.setattr(torch.Tensor, "softmax", refused)
    assert judged(softmax_of_a_sum()).raised == "raised RuntimeError: not today"


def test_dropout_is_judged_by_what_ltc_dropped():
    leaves = (Leaf("p0", "parameter", (33, 5), 1), Leaf("x1", "input", (33, 5), 2))
    steps = (
        Step("v0", "random(F.dropout, {0}, {p})", ("p0",), (("p", 0.5),)),
        Step("v1", "{0} * random(torch.rand_like, {0})", ("v0",)),
        Step("v2", "({0} * {1}).sum()", ("v1", "x1")),
    )
    verdict = judged(Network(leaves, steps, ("v1",), ("v2",)))
    assert (str(verdict), verdict.strict) == ("", 2)


def test_dropout_is_judged_by_what_ltc_dropped_where_it_is_given_zeros():
    """A zero that was kept has a gradient."""
    leaves = (Leaf("p0", "parameter", (33, 5), 1),)
    steps = (
        Step("v0", "{0} - {0}.detach()", ("p0",)),
        Step("v1", "random(F.dropout, {0}, {p})", ("v0",), (("p", 0.5),)),
        Step("v2", "{0}.sum()", ("v1",)),
    )
    assert not str(judged(Network(leaves, steps, ("v1",), ("v2",))))


@pytest.mark.parametrize("error, is_right", [(2e-6, True), (1e-2, False)])
def test_a_sum_that_cancels_is_as_near_as_its_terms_are(monkeypatch, error, is_right):
    added_up = torch.sum

    def in_another_order(x):
        return added_up(x) + (error if x.device.type == "ltc" else 0)

    monkeypatch.setattr(torch, "sum", in_another_order)
    leaves = (Leaf("x0", "input", (8,), 1),)
    steps = (Step("v0", "torch.sum(torch.cat([{0}, -{0}]).sin())", ("x0",)),)
    verdict = judged(Network(leaves, steps, ("v0",)))
    assert (not str(verdict), verdict.widened) == (is_right, int(is_right))


@pytest.mark.parametrize("error, is_right", [(1e-6, True), (1e-2, False)])
def test_a_row_of_equal_numbers_is_as_near_to_its_mean_as_that_is_rounded(
    monkeypatch, error, is_right
):
    """layer_norm multiplies the difference by 1 / sqrt(eps)."""
    normal = torch.layer_norm

    def of_another_mean(x, *more):
        return normal(x, *more) + (error / 1e-5**0.5 if x.device.type == "ltc" else 0)

    monkeypatch.setattr(torch, "layer_norm", of_another_mean)
    leaves = (Leaf("x0", "input", (5, 1), 1),)
    steps = (
        Step("v0", "{0}.expand(5, 31)", ("x0",)),
        Step("v1", "F.layer_norm({0}, (31,))", ("v0",)),
    )
    verdict = judged(Network(leaves, steps, ("v1",)))
    assert (not str(verdict), verdict.widened) == (is_right, int(is_right))


def test_gradients_of_a_norm_that_cancel_are_as_near_as_each_is():
    """A number divided by its own size is 1 or -1, whatever it is: its gradient is g / s - g / s."""
    leaves = (Leaf("p1", "parameter", (1, 31, 1), 843916), Leaf("x7", "input", (1, 1, 31), 205338))
    steps = (
        Step("v1", "F.normalize({0}, dim=-1)", ("p1",)),
        Step("v2", "{0}.transpose(1, 2)", ("v1",)),
        Step("v9", "F.kl_div({0}.log_softmax(-1), {1}.softmax(-1), reduction='batchmean')", ("v2", "x7")),
    )  # fmt: skip
    network = Network(leaves, steps, (), ("v9",), dtype="float16", optimizer="SGD", rounds=2)
    assert not str(judged(network))


def with_gradients_off_by(error: float, function):
    """`function`, of which the first operand's gradient on ltc has a part of the result's more."""

    def off(x, *more, **named):
        result = function(x, *more, **named)
        return result + error * (x - x.detach()) if x.device.type == "ltc" else result

    return off


@pytest.mark.parametrize("error, is_right", [(1e-7, True), (1e-2, False)])
def test_gradients_of_attention_to_one_key_cancel(monkeypatch, error, is_right):
    """Its weight is 1, whatever the query."""
    attention = with_gradients_off_by(error, F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    leaves = (
        Leaf("p1", "parameter", (1, 23, 2, 23), 914585), Leaf("x7", "input", (1, 23, 1, 23), 879662),
        Leaf("x8", "input", (1, 23, 1, 23), 574853), Leaf("x9", "input", (1, 23, 2, 23), 3000),
    )  # fmt: skip
    steps = (
        Step("v1", "F.scaled_dot_product_attention({0}, {1}, {2})", ("p1", "x7", "x8")),
        Step("v2", "({0} * {1}).sum()", ("v1", "x9")),
    )
    assert (not str(judged(Network(leaves, steps, (), ("v2",))))) == is_right


@pytest.mark.parametrize("error, is_right", [(1e-6, True), (1e-1, False)])
def test_gradients_of_rows_of_equal_numbers_cancel(monkeypatch, error, is_right):
    """layer_norm multiplies them by 1 / sqrt(eps), before they are added."""
    monkeypatch.setattr(torch, "layer_norm", with_gradients_off_by(error, torch.layer_norm))
    leaves = (Leaf("p4", "parameter", (2, 1), 45863),)
    steps = (Step("v1", "F.layer_norm({0}.expand(50, 2, 28), (28,)).mean((0, 2)).sum()", ("p4",)),)
    assert (not str(judged(Network(leaves, steps, (), ("v1",))))) == is_right


@pytest.mark.native("calls that run at once round as the CPU does")
@pytest.mark.parametrize("narrow, is_right", [("float16", True), ("float32", False)])
def test_what_only_float16_has_no_numbers_for_is_no_failure(monkeypatch, narrow, is_right):
    """There 1e-12 is 0, and a norm that is 0 but for a rounding is divided by."""
    normal = torch.layer_norm

    def without_roundings(x, *more):
        result = normal(x, *more)
        return result if x.device.type == "ltc" else result + torch.finfo(x.dtype).eps

    monkeypatch.setattr(torch, "layer_norm", without_roundings)
    divided = "F.normalize({0}, dim=-1, eps=1e-12 if {0}.dtype is torch.float16 else {eps})"
    leaves = (Leaf("x0", "input", (5, 1), 1),)
    steps = (
        Step("v0", "F.layer_norm({0}, (1,))", ("x0",)),
        Step("v1", divided, ("v0",), (("eps", 1 if is_right else 0),)),
    )
    verdict = judged(Network(leaves, steps, ("v1",), dtype=narrow))
    assert (not str(verdict), verdict.unjudged) == (is_right, int(is_right)), str(verdict)


def test_a_number_that_depends_on_a_rounding_is_no_failure():
    """The mean of equal numbers is that number, give or take a rounding: its sign is anything."""
    leaves = (Leaf("x0", "input", (1, 33), 1),)
    steps = (
        Step("v0", "{0}.softmax(1).expand(7, 33)", ("x0",)),
        Step("v1", "({0} - {0}.mean(0)).sign()", ("v0",)),
    )
    assert not str(judged(Network(leaves, steps, ("v1",))))


SPECIAL = {"values": "special"}
HIDDEN = [
    # A value's infinity that the mask hides from the first rows, of the last batch.
    ((Leaf("p0", "parameter", (2, 1, 3, 2), 39631, **SPECIAL),),
     Step("v0", "F.scaled_dot_product_attention({0}, {0}, {0} * 0.5, is_causal=True)", ("p0",))),
    # Scores of minus infinity and NaN alone, which PyTorch's kernel takes for a row that is hidden.
    ((Leaf("p2", "input", (1, 2, 2, 16), 584151, **SPECIAL), Leaf("p3", "input", (1, 2, 2, 16), 749813),
      Leaf("x1", "input", (1, 2, 2, 16), 2000)),
     Step("v0", "F.scaled_dot_product_attention({0}, {1}, {2})", ("x1", "p2", "p3"))),
]  # fmt: skip


@pytest.mark.parametrize("leaves, step", HIDDEN, ids=["causal", "whole"])
@pytest.mark.parametrize("factor", [1, 1.01])
def test_attention_to_what_is_no_number_is_judged_row_by_row(monkeypatch, leaves, step, factor):
    attention = F.scaled_dot_product_attention

    def wrong(x, *more, **named):
        return attention(x, *more, **named) * (factor if x.device.type == "ltc" else 1)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    verdict = judged(Network(leaves, (step,), ("v0",)))
    assert (not str(verdict), verdict.strict) == (factor == 1, int(factor == 1))


def test_a_parameter_that_a_step_brings_to_nothing_has_any_sign():
    """Or none: what is next to zero is left by PyTorch's optimizer, and zero by ltc's."""
    leaves = (
        Leaf("p4", "parameter", (1, 8, 8, 8), 142804), Leaf("x7", "input", (1, 8, 8, 8), 223329),
    )  # fmt: skip
    steps = (
        Step("v7", "{0}.norm(dim=0, keepdim=True)", ("p4",)),
        Step("v11", "({0} * {1}).sum()", ("v7", "x7")),
    )
    network = Network(leaves, steps, ("v7",), ("v11",), "float64", optimizer="SGD", rounds=3)
    assert not str(judged(network))


def test_a_sum_that_may_be_nothing_is_divided_by():
    """The mean of what layer_norm makes is zero or a rounding."""
    leaves = (Leaf("p0", "parameter", (1, 2, 3), 151743), Leaf("x6", "input", (1, 1, 1), 3000))
    steps = (
        Step("v1", "F.layer_norm({0}, (3,))", ("p0",)),
        Step("v3", "{0}.permute((1, 0, 2)).sum((0, 2, 1)).reshape(1, 1, 1)", ("v1",)),
        Step("v7", "(F.normalize({0}, dim=-1) * {1}).sum()", ("v3", "x6")),
    )
    assert not str(judged(Network(leaves, steps, (), ("v7",))))


def test_whether_any_of_many_sums_is_above_one_is_any_rounding():
    """They may all be rounded down, as where each term is multiplied by a reciprocal."""
    leaves = (Leaf("p0", "input", (33, 33, 33), 77807),)
    steps = (
        Step("v0", "{0}.softmax(-1)", ("p0",)),
        Step("v1", "({0}.permute(2, 1, 0).sum(0) > 1).any(1, keepdim=True).to(dtype)", ("v0",)),
    )
    assert not str(judged(Network(leaves, steps, ("v1",))))


def test_a_network_is_a_program_that_anyone_can_run():
    names: dict = {"__name__": "elsewhere"}
    exec(softmax_of_a_sum().text(), names)
    named, on_cpu = names["network"]("cpu")
    _, on_ltc = names["network"]("ltc", mark=ltm.mark_step)
    assert named == ["v3", "gradient of 0"]
    for x, y in zip(on_ltc, on_cpu):
        torch.testing.assert_close(x.detach().cpu(), y.detach())


def test_a_seed_gives_one_network():
    assert drawn_network(3).text() == drawn_network(3).text() != drawn_network(4).text()


@pytest.mark.parametrize("block", [block for block, _ in BLOCKS])
def test_every_block_suits_some_values(block):
    drawing, put = Drawing(0, "float32", special=False), 0
    for _ in range(40):
        saved = drawing.saved()
        try:
            block(drawing, drawing.parameter(drawing.any_shape(3)))
            put += 1
        except REFUSALS:
            drawing.restore(saved)
    assert put >= 5, f"{block.__name__} was put {put} times of 40"


@pytest.mark.parametrize("write", WRITES)
def test_no_write_reads_from_a_view_what_it_writes(write):
    """PyTorch refuses that where there are no gaps; with gaps, threads change what it gives."""
    names = {"torch": torch, "device": "cpu", "x": torch.ones(3, 3), "y": torch.ones(3, 3)}
    eval(write.format("x", "y", k=1), names)


@pytest.mark.parametrize("seed", range(12))
def test_a_part_is_written_where_no_other_element_lies(seed):
    """Of a view whose elements overlap PyTorch's copy is another, and has the part there twice."""
    d = Drawing(seed, "float32", special=False)
    windows = d.step("{0}.unfold(0, 4, 2)", d.given((11, 3)))
    written = d.values[copied_into(d, windows)]
    last = d.steps[-1]
    operands = {name: d.values[name].contiguous() for name in last.operands}
    torch.testing.assert_close(written, eval(last.text(), d.names, operands), rtol=0, atol=0)
