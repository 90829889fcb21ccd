"""The loss over sequences that are not aligned (CTC): any lengths, in torch's words."""

import pytest
import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics

STEPS, BATCH, LABELS = 12, 3, 6


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def labels(*shape: int, blank: int = 0) -> torch.Tensor:
    found = torch.randint(0, LABELS - 1, shape, generator=torch.Generator().manual_seed(1))
    return found + (found >= blank)


def loss_and_gradient(device, scores, targets, *lengths, **options):
    x = scores.detach().to(device).requires_grad_()
    made = F.ctc_loss(x.log_softmax(-1), targets.to(device), *lengths, **options)
    made.sum().backward()
    ltm.mark_step()
    return made.detach().cpu(), x.grad.cpu()


def assert_as_on_the_cpu(*given, **options) -> None:
    wanted = loss_and_gradient("cpu", *given, **options)
    with metrics.counted() as grown:
        found = loss_and_gradient("ltc", *given, **options)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert grown["aten::_ctc_loss"] == grown["aten::_ctc_loss_backward"] == 0


LENGTHS = [([12, 12, 12], [4, 4, 4]), ([12, 7, 9], [4, 1, 3]), ([5, 12, 1], [2, 0, 1])]


@pytest.mark.parametrize("tier", ["auto", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("blank", [0, 2, LABELS - 1])
@pytest.mark.parametrize("inputs, wanted", LENGTHS)
def test_losses_of_padded_targets(inputs, wanted, blank, dtype, tier):
    scores, targets = drawn(STEPS, BATCH, LABELS, dtype=dtype), labels(BATCH, 4, blank=blank)
    lengths = torch.tensor(inputs), torch.tensor(wanted)
    with config.override(LTC_TIER=tier):
        for reduction in ("none", "mean", "sum"):
            assert_as_on_the_cpu(scores, targets, *lengths, blank=blank, reduction=reduction)
        assert_as_on_the_cpu(scores, targets.int(), inputs, wanted, blank=blank)


@pytest.mark.parametrize("inputs, wanted", LENGTHS)
def test_losses_of_targets_behind_one_another(inputs, wanted):
    scores, targets = drawn(STEPS, BATCH, LABELS), labels(sum(wanted))
    assert_as_on_the_cpu(scores, targets, inputs, wanted)
    there = [torch.tensor(lengths).to("ltc") for lengths in (inputs, wanted)]
    wanted = loss_and_gradient("cpu", scores, targets, *[one.cpu() for one in there])
    torch.testing.assert_close(loss_and_gradient("ltc", scores, targets, *there), wanted)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_a_target_that_does_not_fit_into_its_sequence(zero_infinity):
    scores, targets = drawn(STEPS, BATCH, LABELS), labels(BATCH, 4)
    given = scores, targets, [2, 12, 12], [4, 2, 3]
    assert_as_on_the_cpu(*given, zero_infinity=zero_infinity, reduction="none")


def test_one_sequence_without_a_batch_and_targets_of_none():
    assert_as_on_the_cpu(drawn(STEPS, LABELS), labels(3), torch.tensor(12), torch.tensor(3))
    assert_as_on_the_cpu(drawn(STEPS, 2, LABELS), labels(0), [12, 12], [0, 0])


WRONG = {
    "a length beyond the end": ([13, 12, 12], [4, 4, 4], {}),
    "a length too few": ([12, 12], [4, 4], {}),
    "more targets than there are": ([12, 12, 12], [5, 4, 4], {}),
    "no such label": ([12, 12, 12], [4, 4, 4], {"blank": LABELS}),
    "a negative length": ([12, 12, 12], [4, -1, 4], {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_in_pytorchs_words(name):
    inputs, wanted, options = WRONG[name]
    scores, targets = drawn(STEPS, BATCH, LABELS), labels(BATCH, 4)
    with pytest.raises(Exception) as theirs:
        F.ctc_loss(scores, targets, inputs, wanted, **options)
    with pytest.raises(type(theirs.value)) as ours:
        F.ctc_loss(scores.to("ltc"), targets.to("ltc"), inputs, wanted, **options)
    assert str(ours.value).startswith(str(theirs.value))
