"""Fully sharded data parallelism, and distributed checkpoints of it, on lazy devices."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)

from ltc.errors import LtcError
from tests.distributed.ranks import test_on_all_ranks  # noqa: F401
from tests.distributed.training import (
    DEVICE,
    assert_trains_like_the_cpu,
    batch,
    compiles_in,
    momentum,
    network,
    run_step,
    train,
    whole,
)


def sharded(model: nn.Module, device: str = "ltc", **how) -> nn.Module:
    """FSDP2: each linear layer by itself, then the whole."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def check_ten_steps_equal_those_on_the_cpu(rank, world):
    assert_trains_like_the_cpu(sharded, rank)


def check_parameters_that_stay_whole_after_the_forward(rank, world):
    assert_trains_like_the_cpu(lambda m, d: sharded(m, d, reshard_after_forward=False), rank)


def check_adam(rank, world):
    # Adam divides by the root of a mean of squares, so where a gradient is nearly 0 the order of a
    # sum would decide; a larger eps keeps it from deciding much
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)

    assert_trains_like_the_cpu(sharded, rank, optimizer=adam)


def check_a_model_on_the_cpu_is_moved_to_the_mesh(rank, world):
    moved = sharded(network())
    assert all(p.device.type == "ltc" for p in moved.parameters())
    for a, b in zip(whole(moved.parameters()), whole(network().parameters())):
        assert torch.equal(a, b)


def check_parameters_kept_on_the_cpu(rank, world):
    def offloaded(model, device):
        return sharded(model.cpu(), device, offload_policy=CPUOffloadPolicy(pin_memory=False))

    assert_trains_like_the_cpu(offloaded, rank)


def check_mixed_precision(rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(network().to(DEVICE), mp_policy=policy)
    start, end = whole(model.parameters()), train(model, rank, DEVICE)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert any((a - b).abs().max() > 1e-2 for a, b in zip(start, end))


def check_gradients_clipped_by_their_norm(rank, world):
    found = []
    for device in ("cpu", DEVICE):
        model = sharded(network().to(device), device.partition(":")[0])
        model(batch(0, rank)[0].to(device)).pow(2).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(whole([norm, *(p.grad for p in model.parameters())]))
    for on_cpu, on_ltc in zip(*found):
        torch.testing.assert_close(on_ltc, on_cpu, rtol=1e-5, atol=1e-6)


def check_a_hundred_steps_compile_two_programs(rank, world):
    assert compiles_in(100, sharded(network().to(DEVICE)), rank) <= 2


def check_whole_parameters_are_held_within_a_step_only(rank, world):
    torch.ltc.synchronize()
    before = torch.ltc.memory_allocated()
    model = sharded(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(DEVICE))
    for _ in range(3):
        model(torch.ones(2, 64, device=DEVICE)).sum().backward()
        model.zero_grad()
        torch.ltc.synchronize()
    share = sum(p.numel() for p in model.parameters()) * 4 / world
    held = torch.ltc.memory_allocated() - before
    assert held <= 1.5 * share, (held, share)


def check_fsdp1_trains_like_the_cpu(rank, world):
    found = {}
    for device in ("cpu", DEVICE):
        model = FullyShardedDataParallel(
            network().to(device), device_id=torch.device(device), use_orig_params=True
        )
        train(model, rank, device)
        with FullyShardedDataParallel.summon_full_params(model):
            found[device] = whole(model.parameters())
    for on_cpu, on_ltc in zip(found["cpu"], found[DEVICE]):
        assert (on_cpu - on_ltc).abs().max() <= 1e-6


def check_fsdp1_gives_its_whole_parameters_with_gradients_there(rank, world):
    model = FullyShardedDataParallel(network().to(DEVICE), device_id=torch.device(DEVICE))
    optimizer = momentum(model.parameters())
    run_step(model, optimizer, batch(0, rank), DEVICE)
    kind, how = StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, kind, how):
        found = model.state_dict()
    run_step(model, optimizer, batch(1, rank), DEVICE)  # all is where it was

    alone = FullyShardedDataParallel(network().to(DEVICE), use_orig_params=True)
    run_step(alone, momentum(alone.parameters()), batch(0, rank), DEVICE)
    with FullyShardedDataParallel.summon_full_params(alone):
        for value, parameter in zip(found.values(), whole(alone.parameters()), strict=True):
            assert value.device.type == "cpu"
            torch.testing.assert_close(value, parameter, rtol=0, atol=1e-6)


def check_a_checkpoint_written_behind_the_training(rank, world):
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    model = sharded(network().to(DEVICE))
    optimizer = momentum(model.parameters())
    run_step(model, optimizer, batch(0, rank), DEVICE)
    state = get_model_state_dict(model)
    before = whole(state.values())
    saved = checkpoint.async_save({"model": state}, checkpoint_id=folders[0])
    run_step(model, optimizer, batch(1, rank), DEVICE)
    saved.result()
    state = get_model_state_dict(model)
    checkpoint.load({"model": state}, checkpoint_id=folders[0])
    assert all(map(torch.equal, whole(state.values()), before))


def check_a_checkpoint_restores_the_training(rank, world):
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    folder = folders[0]
    model = sharded(network().to(DEVICE))
    optimizer = momentum(model.parameters())
    for step in range(3):
        run_step(model, optimizer, batch(step, rank), DEVICE)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    checkpoint.save(states, checkpoint_id=folder)
    run_step(model, optimizer, batch(3, rank), DEVICE)

    again = sharded(network().to(DEVICE))
    other = momentum(again.parameters())
    states = dict(zip(("model", "optimizer"), get_state_dict(again, other)))
    checkpoint.load(states, checkpoint_id=folder)
    set_state_dict(
        again, other, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    run_step(again, other, batch(3, rank), DEVICE)
    for a, b in zip(whole(model.parameters()), whole(again.parameters())):
        assert torch.equal(a, b)


def check_a_checkpoint_is_read_by_another_number_of_ranks(rank, world):
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    model = sharded(network().to(DEVICE))
    run_step(model, momentum(model.parameters()), batch(0, rank), DEVICE)
    checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folders[0])
    alone = network().to(DEVICE)  # as one process has it
    checkpoint.load({"model": alone.state_dict()}, checkpoint_id=folders[0], no_dist=True)
    for a, b in zip(whole(model.parameters()), alone.parameters(), strict=True):
        assert torch.equal(a, b.detach().cpu())


def test_a_storage_resized_to_nothing_gives_its_memory_back():
    x = torch.ones(1000, device="ltc")
    view, storage = x[10:20], x.untyped_storage()
    torch.ltc.synchronize()
    before = torch.ltc.memory_allocated()
    storage.resize_(0)
    assert storage.size() == 0 and before - torch.ltc.memory_allocated() == 4000
    for freed in (x, view):
        with pytest.raises(LtcError, match="freed by resize_"):
            freed.sum().item()
    storage.resize_(4000)
    view.fill_(3)
    assert storage.size() == 4000 and x.sum().item() == 30


def test_a_storage_is_resized_to_nothing_or_to_its_size():
    with pytest.raises(LtcError, match="only to 0 and back"):
        torch.ones(10, device="ltc").untyped_storage().resize_(8)
