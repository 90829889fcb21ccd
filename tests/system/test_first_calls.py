"""What a process imports for its first calls: torch's tools of a second are not among it."""

import os
import subprocess
import sys

import pytest

# Each was one that the first call of a process imported, at some size.
CALLS = """
F.interpolate(r(8, 3, 64, 64), scale_factor=2, mode="bilinear")
F.interpolate(r(8, 3, 64, 64), scale_factor=2, mode="bicubic")
F.interpolate(r(2, 3, 16, 16, 16), scale_factor=2, mode="trilinear")
F.interpolate(r(8, 3, 64, 64), scale_factor=2)
F.interpolate(r(8, 3, 64, 64), scale_factor=0.5, mode="bilinear", antialias=True)
F.grid_sample(r(8, 3, 64, 64), r(8, 64, 64, 2), align_corners=True)
F.affine_grid(r(8, 2, 3), (8, 3, 64, 64), align_corners=True)
F.pixel_shuffle(r(8, 16, 64, 64), 2)
F.pixel_unshuffle(r(8, 16, 64, 64), 2)
F.channel_shuffle(r(8, 16, 64, 64), 2)
F.unfold(r(8, 3, 64, 64), 3)
F.fold(r(8, 27, 3844), (64, 64), 3)
F.max_pool3d(r(2, 3, 32, 32, 32), 2)
F.avg_pool3d(r(2, 3, 32, 32, 32), 2)
F.adaptive_avg_pool3d(r(2, 3, 32, 32, 32), 2)
F.local_response_norm(r(8, 16, 64, 64), 2)
F.one_hot(torch.arange(40000, device="ltc") % 50, 50)
F.multi_margin_loss(r(256, 500), torch.arange(256, device="ltc"))
F.celu(r(256, 500))
F.rrelu(r(256, 500), training=True)
F.gumbel_softmax(r(256, 500))
torch.linspace(0, 1, 500000, device="ltc")
torch.logspace(0, 1, 5, device="ltc")
torch.hann_window(16, device="ltc")
torch.tril_indices(4, 4, device="ltc")
torch.complex(r(256, 500), r(256, 500))
torch.polar(r(256, 500).exp(), r(256, 500))
torch.cdist(r(256, 50), r(300, 50))
torch.cross(r(40000, 3), r(40000, 3), dim=1)
torch.linalg.inv(torch.eye(200).to("ltc"))
torch.linalg.solve(torch.eye(200).to("ltc"), r(200, 2))
torch.linalg.cholesky(torch.eye(200).to("ltc"))
torch.linalg.slogdet(torch.eye(200).to("ltc"))
torch.linalg.svd(r(200, 100))
torch.linalg.eigh(r(200, 200))
torch.linalg.qr(r(200, 200))
torch.linalg.pinv(r(4, 3))
torch.linalg.matrix_exp(torch.eye(20).to("ltc"))
torch.polygamma(1, r(256, 500).exp())
torch.i0(r(256, 500))
torch.isin(torch.arange(40000, device="ltc"), torch.tensor([1, 2]).to("ltc"))
torch.diag_embed(r(200, 200))
torch.diag(r(200, 200))
torch.empty(30000, device="ltc").exponential_()
torch.distributions.Gamma(r(30000).exp(), r(30000).exp()).rsample()
torch.histc(r(50000), 3, -1.0, 1.0)
r(256, 500).kthvalue(2)
r(256, 500).median(1)
r(256, 500).cummax(0)
r(256, 500).logcumsumexp(0)
r(256, 500).aminmax()
r(256, 500).rot90()
r(256, 500).nan_to_num()
r(256, 500).sigmoid().logit()
r(256, 500).masked_scatter(r(256, 500) > 0, r(256, 500))
r(256, 500).take(torch.arange(20, device="ltc"))
r(256, 500).renorm(2, 0, 1.0)
r(256, 256).trace()
r(256, 500).unfold(1, 4, 4).square()
torch.arange(40000, device="ltc") << 1
""".strip().splitlines()
HEAVY = "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy"

PROGRAM = """
import sys
import torch, torch.nn.functional as F
import ltc

def r(*shape):
    leaves.append(torch.randn(*shape).to("ltc").requires_grad_({backward}))
    return leaves[-1]

before = set(sys.modules)
for call in {calls!r}:
    leaves = []
    made = eval(call)
    parts = made if isinstance(made, tuple) else (made,)
    known = [p for p in parts if p.requires_grad and p.is_floating_point()]
    if known:
        sum([p.square().sum() for p in known]).backward()
    ltc.core.lazy_model.mark_step()
    found = [name for name in {heavy!r} if name in sys.modules and name not in before]
    if found:
        sys.exit(f"{{call}} imports {{found}}")
"""


@pytest.mark.parametrize("backward", [False, True])
def test_the_first_calls_of_a_process_import_nothing_large(backward, tmp_path):
    """Fake tensors and torch's kernels in Python import for a second what tells some types."""
    text = PROGRAM.format(calls=CALLS, heavy=HEAVY, backward=backward)
    settings = {"LTC_TIER": "auto", "LTC_NUM_DEVICES": "1", "LTC_CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, **settings}  # as users run it
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
