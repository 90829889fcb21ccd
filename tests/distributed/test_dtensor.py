"""DTensor and tensor parallelism on a mesh of lazy devices."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.distributed.ranks import test_on_all_ranks  # noqa: F401
from tests.distributed.training import (
    DEVICE,
    assert_trains_like_the_cpu,
    compiles_in,
    network,
    whole,
)


def mesh_of(device: str):
    return init_device_mesh(device, (dist.get_world_size(),))


def parallel(model: nn.Module, device: str = "ltc") -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh_of(device), plan)


def on_both(compute) -> None:
    """`compute(mesh, device)` gives the same tensors on the CPU and on ltc."""
    found = [whole(compute(mesh_of(device), device)) for device in ("cpu", "ltc")]
    for on_cpu, on_ltc in zip(*found):
        torch.testing.assert_close(on_ltc, on_cpu, rtol=1e-5, atol=1e-6)


def check_a_sharded_tensor_computes_like_a_whole_one(rank, world):
    def compute(mesh, device):
        x = distribute_tensor(torch.arange(12.0).reshape(4, 3).to(device), mesh, [Shard(0)])
        ones = distribute_tensor(torch.ones(3, 2).to(device), mesh, [Replicate()])
        return [x * 2, x.sum(), x @ ones, (x @ ones).softmax(-1), x.mean(0), x.max()]

    on_both(compute)


def check_redistribution_between_all_placements(rank, world):
    placements = [Shard(0), Shard(1), Replicate()]

    def compute(mesh, device):
        results = []
        for source in placements:
            for target in placements:
                x = distribute_tensor(torch.arange(24.0).reshape(4, 6).to(device), mesh, [source])
                results.append(x.redistribute(mesh, [target]).to_local())
        return results

    on_both(compute)


def check_partial_sums_are_added_when_read(rank, world):
    def compute(mesh, device):
        local = torch.full((4, 2), rank + 1.0, device=device)
        x = torch.distributed.tensor.DTensor.from_local(local, mesh, [Partial()])
        return [x.redistribute(mesh, [Shard(0)]).to_local(), x]

    on_both(compute)


def check_uneven_shards(rank, world):
    def compute(mesh, device):
        x = distribute_tensor(torch.arange(15.0).reshape(5, 3).to(device), mesh, [Shard(0)])
        return [x + 1, x.sum(0)]

    on_both(compute)


def check_gradients_of_a_sharded_product(rank, world):
    def compute(mesh, device):
        torch.manual_seed(1)
        w = torch.randn(4, 4).to(device)
        x = distribute_tensor(torch.randn(6, 4).to(device), mesh, [Shard(0)]).requires_grad_()
        weight = distribute_tensor(w, mesh, [Shard(1)]).requires_grad_()
        (x @ weight).relu().pow(2).sum().backward()
        return [x.grad, weight.grad]

    on_both(compute)


def check_tensor_parallel_training_equals_that_on_the_cpu(rank, world):
    # every rank has the same samples: the model is split, not the data
    assert_trains_like_the_cpu(parallel, 0)


def check_sequence_parallel_norm(rank, world):
    def compute(mesh, device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).to(device)
        plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
        parallelize_module(model, mesh, plan)
        x = torch.randn(2, 4, 8).to(device)
        local = x.chunk(world, 1)[rank]
        model(local).pow(2).sum().backward()
        return [model[1].weight.grad]

    on_both(compute)


def check_a_hundred_steps_compile_two_programs(rank, world):
    assert compiles_in(100, parallel(network().to(DEVICE)), 0) <= 2


def check_a_mesh_has_the_device(rank, world):
    mesh = mesh_of("ltc")
    assert mesh.device_type == "ltc" and mesh.size() == world
    assert mesh.get_local_rank() == rank
