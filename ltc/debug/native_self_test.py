"""A process tries a core that was just built: `python -m ltc.debug.native_self_test`.

A wrong guess about torch ends a process, where no exception would tell of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm
from ltc.native.core import CORE


def _trained(device: str) -> list[torch.Tensor]:
    """Weights after some steps of a small network, with views, lists and writes among its calls."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 6, generator=generator), torch.randn(3, 4, generator=generator)]
    first, second = (w.to(device).requires_grad_() for w in weights)
    x = torch.randn(5, 6, generator=generator).to(device)
    y = torch.tensor([0, 2, 1, 0, 2]).to(device)
    optimizer = torch.optim.SGD([first, second], lr=0.1, foreach=True)
    for _ in range(4):
        hidden = F.linear(x, first).relu()
        hidden = torch.cat([hidden[:, :2], hidden[:, 2:] * 2], 1)
        loss = F.cross_entropy(F.linear(hidden, second), y) + first.t()[1].square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            first[0].mul_(0.5)
        if device != "cpu":
            ltm.mark_step()
    return [first.detach().cpu(), second.detach().cpu(), loss.detach().cpu()]


def main() -> None:
    """Compare the core's numbers with PyTorch's; raises AssertionError where they differ."""
    for ours, theirs in zip(_trained("ltc"), _trained("cpu")):
        torch.testing.assert_close(ours, theirs)
    assert CORE is not None, "no core was loaded"
    assert CORE.ran() > 50, f"the core ran {CORE.ran()} calls"


if __name__ == "__main__":
    main()
