"""DistributedDataParallel on lazy devices trains as on the CPU, in few programs."""

import copy
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.ranks import ROOT, test_on_all_ranks  # noqa: F401
from tests.distributed.training import (
    DEVICE,
    assert_trains_like_the_cpu,
    batch,
    compiles_in,
    network,
    run_step,
    whole,
)

AS_A_USER = {**os.environ, "LTC_NUM_DEVICES": "1", "LTC_CHECK": "0"}


def wrapped(model: nn.Module, device: str = "", **how) -> nn.Module:
    return DistributedDataParallel(model, **how)


def check_ten_steps_equal_those_on_the_cpu(rank, world):
    assert_trains_like_the_cpu(wrapped, rank)


def check_gradients_that_are_views_of_buckets(rank, world):
    assert_trains_like_the_cpu(lambda m, _: wrapped(m, gradient_as_bucket_view=True), rank)


def check_several_buckets(rank, world):
    assert_trains_like_the_cpu(lambda m, _: wrapped(m, bucket_cap_mb=1e-4), rank)


def check_batch_norm_with_buffers(rank, world):
    assert_trains_like_the_cpu(wrapped, rank, lambda: network(nn.BatchNorm1d))


def check_sync_batch_norm_equals_one_process_with_all_samples(rank, world):
    torch.manual_seed(0)
    x = torch.randn(4 * world, 3, 2, dtype=torch.float64)
    alone = nn.BatchNorm1d(3).double()
    expected = x.clone().requires_grad_()
    (alone(expected) ** 3).sum().backward()

    together = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3).double()).to(DEVICE)
    mine = x[4 * rank : 4 * rank + 4].to(DEVICE).requires_grad_()
    (together(mine) ** 3).sum().backward()
    torch.testing.assert_close(mine.grad.cpu(), expected.grad[4 * rank : 4 * rank + 4])
    torch.testing.assert_close(together.running_var.cpu(), alone.running_var)


def check_a_step_without_exchange_then_one_with(rank, world):
    found = []
    for device in ("cpu", DEVICE):
        model = wrapped(network().to(device))
        with model.no_sync():
            model(batch(0, rank)[0].to(device)).sum().backward()
        model(batch(1, rank)[0].to(device)).sum().backward()
        found.append(whole(p.grad for p in model.parameters()))
    for on_cpu, on_ltc in zip(*found):
        torch.testing.assert_close(on_ltc, on_cpu, rtol=1e-5, atol=1e-6)


def check_a_communication_hook(rank, world):
    def halved(state, bucket):
        return (
            dist.all_reduce(bucket.buffer().div_(2), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    def with_hook(model, _):
        model = wrapped(model)
        model.register_comm_hook(None, halved)
        return model

    assert_trains_like_the_cpu(with_hook, rank)


def check_the_built_in_communication_hooks(rank, world):
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        gradients = []
        for device in ("cpu", DEVICE):
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Linear(3, 2).to(device))
            model._register_builtin_comm_hook(kind)
            model(torch.full((2, 3), rank + 1.0, device=device)).square().sum().backward()
            gradients.append(model.module.weight.grad.cpu())
        # halved before they are added, or after: in float16 one unit in the last place
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def check_zero_redundancy_optimizer(rank, world):
    def sharded(parameters):
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=1e-2)

    assert_trains_like_the_cpu(wrapped, rank, optimizer=sharded)


def check_the_shards_of_an_optimizers_state_come_to_one_rank(rank, world):
    model = wrapped(network().to(DEVICE))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    model(batch(0, rank)[0].to(DEVICE)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        states = optimizer.state_dict()["state"].values()
        assert len(states) == len(list(model.parameters()))
        assert all(state["step"] == 1 for state in states)


def check_one_process_with_all_batches_gives_the_same_weights(rank, world):
    model = wrapped(network().to(DEVICE))
    alone = network()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for step in range(10):
        run_step(model, optimizers[0], batch(step, rank), DEVICE)
        together = [torch.cat(parts) for parts in zip(*(batch(step, r) for r in range(world)))]
        run_step(alone, optimizers[1], together, "cpu")
    for mine, expected in zip(whole(model.parameters()), alone.parameters()):
        assert (mine - expected).abs().max() <= 1e-6  # float32: sums in another order
    return b"".join(p.numpy().tobytes() for p in whole(model.parameters()))


def check_a_hundred_steps_compile_two_programs(rank, world):
    for how in ({}, {"gradient_as_bucket_view": True}):
        assert compiles_in(100, wrapped(network().to(DEVICE), **how), rank) <= 2, how


def check_a_saved_model_loads_where_there_is_no_process_group(rank, world):
    model = wrapped(network().to(DEVICE))
    state = {name: value.cpu() for name, value in model.module.state_dict().items()}
    plain = copy.deepcopy(network())
    plain.load_state_dict(state)


def test_the_weights_are_the_same_bits_on_every_rank(found):
    bits = found.of("check_one_process_with_all_batches_gives_the_same_weights")
    assert len(set(bits)) == 1


def test_the_example_reaches_97_percent_under_torchrun():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    example = ["examples/mnist/train_ddp.py", "--target-accuracy", "97"]
    found = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *example],
        cwd=ROOT,
        env={**AS_A_USER, "PYTHONPATH": "."},
        text=True,
        capture_output=True,
    )
    assert found.returncode == 0 and "2 processes" in found.stdout, found.stdout + found.stderr


def test_two_hosts_of_two_processes_train_together():
    found = subprocess.run(
        ["scripts/cluster/two_hosts", "examples/mnist/train_ddp.py", "--epochs", "1"],
        cwd=ROOT,
        env={**AS_A_USER, "PYTHON": sys.executable},
        text=True,
        capture_output=True,
    )
    assert found.returncode == 0 and "4 processes" in found.stdout, found.stdout + found.stderr
