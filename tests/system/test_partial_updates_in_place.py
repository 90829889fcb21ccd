"""An update of a part in place: what it lies over is copied where its memory is needed till later."""

import pytest
import torch

import ltc.core.lazy_model as ltm

pytestmark = pytest.mark.also_native


@pytest.mark.parametrize("rows", [4, 8, 64])
def test_a_part_is_replaced_in_what_its_step_reads_again(rows):
    def step(device: str) -> list[torch.Tensor]:
        source = torch.Generator().manual_seed(rows)
        p = torch.randn(rows, 2, generator=source, dtype=torch.float64).to(device)
        row = torch.randn(2, generator=source, dtype=torch.float64).to(device)
        ltm.mark_step()
        changed = torch.select_scatter(p, row.softmax(-1), 0, rows // 2)
        p.mul_(changed.sum(0))
        ltm.mark_step()
        return [changed.cpu(), p.cpu()]

    for ours, theirs in zip(step("ltc"), step("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)
