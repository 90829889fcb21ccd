"""Files: written from the device, read to it, tagged, cached."""

import os
import tempfile

import torch
import torch_xla.core.xla_model as xm
import torch_xla.utils.serialization as xser
import torch_xla.utils.utils as xu
from torch_xla.utils.cached_dataset import CachedDataset
from torch_xla.utils.checkpoint_tagger import CheckpointTagger


def main(folder):
    device = xm.xla_device()
    model = torch.nn.Linear(3, 2).to(device)
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    path = os.path.join(folder, "model.pt")
    xm.save(model.state_dict(), path)
    assert_same(torch.load(path), expected, "cpu")
    torch.save(model.state_dict(), path)  # as the device has it
    for place in ("xla", "xla:0", device, torch.device("xla")):
        assert_same(torch.load(path, map_location=place), expected, "xla")
    assert_same(torch.load(path, map_location="cpu"), expected, "cpu")
    model.load_state_dict(torch.load(path))
    assert model.weight.is_xla

    xser.save({"model": model.state_dict(), "step": 3}, path + ".xser")
    loaded = xser.load(path + ".xser")
    assert loaded["step"] == 3
    assert_same(loaded["model"], expected, "cpu")

    base = torch.ones(4, device=device)
    try:
        xm.check_view_sharing([base, base[:2]])
        raise AssertionError("a view is not seen")
    except RuntimeError as error:
        assert "is sharing a view with tensor ID" in str(error)
    uploads(device)
    around_a_run(folder)


def assert_same(state, expected, kind):
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert xm.is_xla_tensor(value) == (kind == "xla")
        assert torch.equal(value.cpu(), expected[name])


def uploads(device):
    sent = xm.send_cpu_data_to_device({"x": torch.ones(2), "n": 3}, device)
    assert sent["n"] == 3 and sent["x"].device == device
    arena = xm.ToXlaTensorArena(
        lambda tensors: [t.to(device) for t in tensors], lambda v: isinstance(v, torch.Tensor)
    )
    assert all(t.is_xla for t in arena.transform([torch.ones(1), torch.zeros(1)]))


def around_a_run(folder):
    removed = []
    tagger = CheckpointTagger(removed.append)
    tagger.tag("best", "a")
    tagger.tag("best", "b")
    assert removed == ["a"] and tagger.tags() == {"best": "b"}
    samples = CachedDataset([torch.ones(2), torch.zeros(2)], os.path.join(folder, "samples"))
    samples.warmup()
    assert samples[1].tolist() == [0.0, 0.0] and len(samples) == 2
    assert len(list(xu.SampleGenerator(data=1, sample_count=3))) == 3
    assert xu.as_list(3) == [3] and xu.parallel_work(2, len, ["a", "bc"]) == [1, 2]
    assert xu.timed(lambda: 5, printfn=xu.null_print) == 5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
