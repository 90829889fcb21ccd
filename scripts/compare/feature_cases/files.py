"""Copies, files and batches of data."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils import data

from feature_cases.programs import drawn, feature, integers, made, perceptron, table


@feature("modules")
def hooks_of_modules(d):
    module, seen = made(perceptron, d), []
    module.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    module[0].register_forward_hook(lambda m, a, out: out + 1)
    module[2].register_full_backward_hook(lambda m, gi, go: seen.append(gi[0].clone()))
    module[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
    module(drawn(d, 2, 4)).sum().backward()
    return [p.grad for p in module.parameters()], seen


@feature("modules")
def hooks_of_all_modules(d):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, out: seen.append(out))
    made(perceptron, d)(drawn(d, 2, 4))
    handle.remove()
    return seen


@feature("modules")
def state_dict_with_assign(d):
    module, other = made(perceptron, d), perceptron()
    other.load_state_dict(module.state_dict(), assign=True)
    return other(drawn(d, 2, 4)).detach()


@feature("modules")
def meta_modules_become_empty(d):
    with torch.device("meta"):
        module = perceptron()
    module = module.to_empty(device=d)
    module.load_state_dict(made(perceptron, d).state_dict())
    return module(drawn(d, 2, 4)).detach()


@feature("modules")
def modules_made_under_a_device(d):
    with torch.device(d):
        module = nn.Linear(3, 2)
        x = torch.ones(2, 3)
    return module(x).device.type == d, module.weight.device.type == d


@feature("modules")
def dtypes_of_a_module(d):
    module = made(perceptron, d)
    return module.double()(drawn(d, 2, 4).double()).detach(), module.bfloat16()[0].weight.dtype


@feature("modules")
def ties_survive_a_move(d):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module.to(d)
    return module[0].weight is module[1].weight


table(
    "copies and files",
    deepcopy_of_a_module=lambda d: list(copy.deepcopy(made(perceptron, d)).parameters()),
    deepcopy_of_shared_tensors=lambda d: len(set(map(id, copy.deepcopy([drawn(d, 2)] * 2)))),
    pickle=lambda d: pickle.loads(pickle.dumps(drawn(d, 3))),
    pickle_of_a_parameter=lambda d: pickle.loads(pickle.dumps(nn.Parameter(drawn(d, 3)))).detach(),
    to_numpy=lambda d: drawn(d, 3).cpu().numpy().tolist(),
    from_numpy=lambda d: torch.from_numpy(drawn("cpu", 3).numpy()).to(d),
    tolist=lambda d: drawn(d, 2, 3).tolist(),
    python_numbers=lambda d: (
        float(drawn(d, 1)), int(torch.tensor(3.7, device=d)), bool(torch.tensor(0, device=d)),
    ),
    text=lambda d: f"{torch.tensor(1.5, device=d).item():.2f}",
    dlpack_of_a_copy=lambda d: torch.from_dlpack(drawn(d, 3).cpu()),
)  # fmt: skip


@feature("copies and files")
def save_and_load(d):
    file = io.BytesIO()
    torch.save({"model": made(perceptron, d).state_dict(), "x": drawn(d, 2)}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=d, weights_only=True)
    return loaded["model"], loaded["x"].device.type == d


@feature("copies and files")
def load_on_the_cpu(d):
    file = io.BytesIO()
    torch.save(drawn(d, 3), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    return loaded, loaded.device


@feature("copies and files")
def views_share_memory_after_loading(d):
    x, file = drawn(d, 4), io.BytesIO()
    torch.save([x, x[1:3]], file)
    file.seek(0)
    base, view = torch.load(file)
    view.zero_()
    return base


@feature("copies and files")
def safetensors_file(d):
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        save_file({"x": drawn(d, 3)}, path)
        x = load_file(path, device=d)["x"]
        return x, x.device.type == d


@feature("copies and files")
def distributed_checkpoint(d):
    from torch.distributed import checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"x": drawn(d, 3)}, checkpoint_id=folder, no_dist=True)
        state = {"x": torch.zeros(3, device=d)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state


def loaded_batches(d, **options):
    rows = data.TensorDataset(drawn("cpu", 10, 3), integers("cpu", 4, 10))
    generator = torch.Generator().manual_seed(0)
    loader = data.DataLoader(rows, batch_size=4, shuffle=True, generator=generator, **options)
    return [(x.to(d, non_blocking=True), y.to(d)) for x, y in loader]


table(
    "data",
    DataLoader=loaded_batches,
    DataLoader_with_workers=lambda d: loaded_batches(d, num_workers=1),
    DataLoader_with_pinned_memory=lambda d: loaded_batches(d, pin_memory=True),
    DataLoader_of_device_tensors=lambda d: list(
        data.DataLoader(data.TensorDataset(drawn(d, 5, 2)), batch_size=2)
    ),
    random_split=lambda d: [
        part[0] for part in data.random_split(
            data.TensorDataset(drawn(d, 6, 2)), [4, 2], torch.Generator().manual_seed(0)
        )
    ],
    default_collate=lambda d: data.default_collate([{"x": drawn(d, 2), "y": 1}] * 2),
    WeightedRandomSampler=lambda d: list(
        data.WeightedRandomSampler(
            drawn(d, 5).abs().cpu(), 4, generator=torch.Generator().manual_seed(0)
        )
    ),
)  # fmt: skip
