"""A call that runs at once on the CPU reads its operands where they lie, and leaves them alone."""

import pytest
import torch

from ltc.debug import metrics
from ltc.device.recording import fallback, slow_path


def selected(x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    return [x[mask], x.masked_select(mask[:, None]), mask.nonzero(), x.unique()]


@pytest.mark.native("a recorded step has calls that are run eagerly in its midst")
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:], lambda x: x.t(), lambda x: x + 0])
def test_an_operand_that_is_only_read_is_not_copied(view, monkeypatch):
    """Of a mask that selects little of much, the copy would be most of the time."""
    monkeypatch.setattr(fallback, "_copy", lambda tensor: pytest.fail("copied"))
    values = torch.arange(30.0).view(6, 5)
    x, wanted = values.to("ltc"), view(values)
    mask = torch.arange(len(wanted)) % 2 == 1
    with metrics.counted() as grown:
        found = selected(view(x), mask.to("ltc"))
    assert grown["aten::index"] == 1
    for mine, theirs in zip(found, selected(wanted, mask), strict=True):
        assert torch.equal(mine.cpu(), theirs)
        mine.add_(1)
    assert torch.equal(x.cpu(), values)


@pytest.mark.native("a recorded step has calls that are run eagerly in its midst")
def test_what_a_mask_selects_is_not_tried_to_record(monkeypatch):
    """No type tells how many are selected, so to look for one, and a place on the path, is in vain."""
    x, y = torch.arange(6.0).to("ltc"), torch.arange(12.0).view(6, 2).to("ltc")
    mask = (torch.arange(6) % 2 == 1).to("ltc")
    pending = x * 2
    monkeypatch.setattr(slow_path, "_Lowered", lambda *_: pytest.fail("tried"))
    with metrics.counted() as grown:
        found = y[mask]
    assert grown["aten::index"] == 1 and grown["EarlySyncLiveTensorsCount"] == 0
    assert found.tolist() == [[2, 3], [6, 7], [10, 11]] and pending.tolist() == [0, 2, 4, 6, 8, 10]


def test_a_mask_of_another_size_is_pytorchs_error():
    x, mask = torch.arange(6.0), torch.ones(5, dtype=torch.bool)
    with pytest.raises(IndexError) as wanted:
        x[mask]
    with pytest.raises(IndexError) as found:
        x.to("ltc")[mask.to("ltc")]
    assert str(found.value).startswith(str(wanted.value))


@pytest.mark.native("a recorded step has calls that are run eagerly in its midst")
def test_what_is_written_to_is_written_once_and_returned():
    x = torch.zeros(4, device="ltc")
    view, out = x[1:3], torch.empty(0, dtype=torch.int64, device="ltc")
    torch.nonzero(torch.tensor([0, 3, 0]).to("ltc"), out=out)
    assert out.tolist() == [[1]]
    with pytest.raises(RuntimeError):
        view.masked_scatter_(torch.tensor([True, True]).to("ltc"), torch.ones(1, device="ltc"))
        x.cpu()
    assert x.tolist() == [0, 0, 0, 0]
