"""What dropout drops, where it runs in the epilogue of a product as well as by itself."""

import pytest
import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm

pytestmark = pytest.mark.also_native


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 8, 31])
def test_a_product_is_dropped_alike_in_one_program_and_in_two(dtype, columns):
    x, bias = (torch.randn(*shape, dtype=dtype, device="ltc") for shape in ((3, 2), (columns,)))
    weight = torch.randn(columns, 2, dtype=dtype, device="ltc")
    ltm.mark_step()

    def dropped(cut: bool) -> torch.Tensor:
        product = F.linear(x, weight * 1.0, bias)
        if cut:
            ltm.mark_step()
        torch.manual_seed(5)
        return F.dropout(product, 0.5).cpu()

    torch.testing.assert_close(dropped(False), dropped(True))
