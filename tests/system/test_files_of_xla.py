"""Files of a training on XLA: what is saved, how it is fetched, and that another backend goes on from it."""

import weakref

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser
from ltc import config
from ltc.runtime.background import worker_process

pytest.importorskip("jax", reason="JAX is not installed")
from ltc.backends.xla import computation

STEPS = 4
BACKENDS = ("xla", "llvm")


class Training:
    """A small network with dropout, norms and integers among its state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)
        self.model = nn.Sequential(*layers).to("ltc")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def losses(self, first: int) -> list[float]:
        """Those of STEPS steps; each draws its own batch and its own masks."""
        return [self._loss(step) for step in range(first, first + STEPS)]

    def _loss(self, step: int) -> float:
        torch.manual_seed(step)
        images, labels = torch.randn(8, 6).to("ltc"), torch.randint(3, (8,)).to("ltc")
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        ltm.mark_step()
        return loss.item()

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


SAVES = {"ltm": (ltm.save, torch.load), "xser": (xser.save, xser.load)}


@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize(("saved_by", "resumed_by"), [("xla", "llvm"), ("llvm", "xla")])
def test_another_backend_resumes_from_equal_values(way, saved_by, resumed_by, tmp_path):
    save, load = SAVES[way]
    with config.override(LTC_BACKEND=saved_by):
        training = Training()
        training.losses(0)
        save(training.state(), tmp_path / "state")
        kept = [x.detach().cpu().clone() for x in training.model.state_dict().values()]
        expected = training.losses(STEPS)
    with config.override(LTC_BACKEND=resumed_by):
        resumed = Training()
        resumed.load(load(tmp_path / "state"))
        for mine, theirs in zip(resumed.model.state_dict().values(), kept, strict=True):
            assert torch.equal(mine.cpu(), theirs)
        found = resumed.losses(STEPS)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_no_copy_of_a_process_with_jaxs_threads_compiles():
    with config.override(LTC_BACKEND="xla"):
        (torch.ones(3).to("ltc") + 1).tolist()
    assert not worker_process._may_copy()


def test_a_file_of_either_backend_has_the_same_bytes(tmp_path):
    for backend in BACKENDS:
        with config.override(LTC_BACKEND=backend):
            torch.manual_seed(0)
            values = {"a": torch.randn(5, 3).to("ltc"), "b": torch.arange(4).to("ltc")}
            values["view"] = values["a"][1:]
            xser.save(values, tmp_path / backend)
    first, second = ((tmp_path / backend).read_bytes() for backend in BACKENDS)
    assert first == second


def test_xser_fetches_one_tensor_at_a_time_from_the_device(tmp_path, monkeypatch):
    on_host, most = weakref.WeakSet(), 0
    download = computation.XlaComputation.download

    def noted(buffer):
        nonlocal most
        tensor = download(buffer)
        on_host.add(tensor)
        most = max(most, len(on_host))
        return tensor

    with config.override(LTC_BACKEND="xla"):
        state = {str(k): torch.randn(1 << 16).to("ltc") * 2 for k in range(20)}
        ltm.mark_step(wait=True)
        monkeypatch.setattr(computation.XlaComputation, "download", staticmethod(noted))
        xser.save(state, tmp_path / "state")
        monkeypatch.undo()
        loaded = xser.load(tmp_path / "state")
        for name, value in state.items():
            assert torch.equal(loaded[name], value.cpu())
    assert 1 <= most <= 2
