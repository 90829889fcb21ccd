"""Every way in which a step can come to differ is explained, at the line to blame."""

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.explaining import history
from tests.explained import data, in_a_thread, line_to_blame

F = torch.nn.functional

# Each is a step, given a number that no other step has as a size, and whether the change is made.
# The line to blame ends in "# here"; the decorator says which kind of difference is to be told.
WAYS = {}


def way(reason, *told):
    """`told`: what the explanation says as well."""

    def register(step):
        WAYS[step.__name__] = (step, reason, told)
        return step

    return register


@way("shape", "dimension 0 is 3, was 8")
def a_smaller_last_batch(n, changed):
    batch = data(3 if changed else 8, n)
    loss = batch.exp().sum()  # here
    ltm.mark_step()
    return loss


@way("shape", "dimension 1 is")
def a_longer_sequence(n, changed):
    batch = data(2, 2 * n if changed else n)
    loss = batch.cumsum(1)  # here
    ltm.mark_step()
    return loss


@way("shape", "3 dimensions where there were 2")
def another_number_of_dimensions(n, changed):
    batch = data(2, 1, n) if changed else data(2, n)
    loss = batch.exp()  # here
    ltm.mark_step()
    return loss


@way("shape", "with size")
def a_buffer_made_in_another_size(n, changed):
    made = torch.ones(n + 1 if changed else n, device="ltc")  # here
    loss = made.cos()
    ltm.mark_step()
    return loss


@way("dtype", "float64", "float32")
def a_batch_of_another_dtype(n, changed):
    batch = data(n, dtype=torch.float64 if changed else torch.float32)
    loss = batch.exp()  # here
    ltm.mark_step()
    return loss


@way("dtype", "aten::_to_copy")
def autocast_in_one_step(n, changed):
    batch, weight = data(n, n), data(n, n)
    with torch.autocast("ltc", enabled=changed):
        loss = batch @ weight  # here
    ltm.mark_step()
    return loss


@way("dtype", "torch.float64", "torch.float16")
def a_cast_to_another_dtype(n, changed):
    loss = data(n).to(torch.float16 if changed else torch.float64)  # here
    ltm.mark_step()
    return loss


@way("number", "start")
def another_slice(n, changed):
    loss = data(n)[2 if changed else 1 :].exp()  # here
    ltm.mark_step()
    return loss


@way("number", "index 0", "got 1")
def another_index(n, changed):
    loss = data(4, n)[1 if changed else 0].exp()  # here
    ltm.mark_step()
    return loss


@way("number", "aten::roll", "shifts [1]", "got [2]")
def another_shift(n, changed):
    loss = data(n).roll(2 if changed else 1)  # here
    ltm.mark_step()
    return loss


@way("number", "of type int", "of type float")
def an_integer_that_becomes_a_float(n, changed):
    loss = data(n) * (2.5 if changed else 2)  # here
    ltm.mark_step()
    return loss


@way("number", "exponent 2", "got 3")
def another_exponent(n, changed):
    loss = data(n) ** (3 if changed else 2)  # here
    ltm.mark_step()
    return loss


@way("number", "dim [0]", "got [1]")
def another_dimension_to_sum_over(n, changed):
    loss = data(n, n).sum(1 if changed else 0)  # here
    ltm.mark_step()
    return loss


@way("operation", "aten::relu", "aten::gelu")
def another_branch_of_an_if(n, changed):
    x = data(n)
    loss = F.gelu(x) if changed else x.relu()  # here
    ltm.mark_step()
    return loss


@way("operation", "aten::sum", "aten::cos")
def an_operation_more(n, changed):
    loss = data(n).exp()
    if changed:
        loss = loss.cos()  # here
    loss = loss.sum()
    ltm.mark_step()
    return loss


@way("operation", "aten::tanh", "aten::sum")
def a_dropped_layer(n, changed):
    x = data(n).exp()
    if not changed:
        x = x.tanh()
    loss = x.sum()  # here
    ltm.mark_step()
    return loss


@way("operation", "aten::mul")
def a_network_that_evaluates(n, changed):
    layer = torch.nn.Dropout(0.5).train(not changed)
    loss = layer(data(n)) * 3  # here
    ltm.mark_step()
    return loss


@way("operand", "another tensor", "aten::sin", "aten::cos")
def operands_in_another_order(n, changed):
    x = data(n)
    a, b = x.sin(), x.cos()
    loss = b - a if changed else a - b  # here
    ltm.mark_step()
    return loss


@way("longer", "the end of the step", "aten::sin")
def a_step_that_goes_on(n, changed):
    loss = data(n).exp()
    if changed:
        loss = loss.sin()  # here
    ltm.mark_step()
    return loss


@way("shorter", "aten::sin", "got the end of the step")
def a_step_that_ends_early(n, changed):
    loss = data(n).exp()
    if not changed:
        loss = loss.sin()
    ltm.mark_step()  # here
    return loss


@way("alive", "also alive at its end", "aten::cos")
def a_list_that_keeps_a_tensor(n, changed):
    kept = []
    hidden = data(n).cos()
    loss = hidden.sum()
    if changed:
        kept.append(hidden)
    del hidden
    ltm.mark_step()  # here
    return loss, kept


@way("alive", "no longer alive", "aten::cos")
def a_tensor_that_is_let_go(n, changed):
    hidden = data(n).cos()
    loss = hidden.sum()
    if changed:
        del hidden
    ltm.mark_step()  # here
    return loss


@way("settings", "LTC_CHECK_INDEX is False, was True")
def another_setting(n, changed):
    loss = data(n).exp()
    with config.override(LTC_CHECK_INDEX=not changed):
        ltm.mark_step()  # here
    return loss


@way("cut", "float32[]", "aten::sum")
def a_loss_that_is_logged_now_and_then(n, changed):
    loss = data(n).exp().sum()
    if changed:
        str(loss.item())  # here
    loss = loss * 2
    ltm.mark_step()
    return loss


@way("cut", "bool[]")
def a_branch_on_a_value(n, changed):
    loss = data(n).exp()
    if changed and loss.max() > 2:  # here
        loss = loss.sin()
    loss = loss * 3
    ltm.mark_step()
    return loss


@pytest.fixture(autouse=True)
def nothing_of_before():
    history.forget()


def three_then_a_changed_one(step, n):
    for _ in range(3):
        step(n, False)
    history.forget()
    step(n, True)
    return ltc.explain()


@pytest.mark.parametrize("name", WAYS)
def test_a_step_that_differs_is_explained_with_the_line_to_blame(name):
    step, reason, told = WAYS[name]
    n = 50 + list(WAYS).index(name)
    with config.override(LTC_TIER="native", LTC_NUM_DEVICES=1, LTC_CACHE=0):
        explanations = in_a_thread(three_then_a_changed_one, step, n)
    made = [explanation for explanation in explanations if explanation.kind == "recompiles"]
    assert {explanation.line for explanation in made} == {line_to_blame(step)}, explanations
    text = next(str(explanation) for explanation in made if explanation.reason == reason)
    assert all(words in text for words in told), text
    assert len(text.splitlines()) == 3  # what, why and the cure


def test_a_side_exit_is_explained_with_the_line_to_blame():
    step = a_smaller_last_batch
    with config.override(LTC_TIER="auto", LTC_NUM_DEVICES=1, LTC_CACHE=0):
        explanations = in_a_thread(three_then_a_changed_one, step, 171)
    (made,) = [explanation for explanation in explanations if "side exit" in explanation.what]
    assert made.line == line_to_blame(step)
    assert "dimension 0 is 3, was 8" in str(made)


@pytest.mark.native("a tier explains that it compiles, whatever is repeated")
@pytest.mark.parametrize("name", WAYS)
def test_a_step_that_is_the_same_as_before_needs_no_explanation(name):
    step, *_ = WAYS[name]
    n = 300 + list(WAYS).index(name)

    def both_ways_twice():
        for changed in (False, True, False, True):
            step(n, changed)
        history.forget()
        step(n, False)
        step(n, True)
        return [explanation for explanation in ltc.explain() if explanation.kind != "cuts"]

    assert in_a_thread(both_ways_twice) == []
