"""Every exchange of xla_model, between two replicas."""

import torch
import torch_xla
import torch_xla.core.functions as xf
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch_xla._internal import pjrt


def exchange(index):
    device, rank, world = xm.xla_device(), xr.global_ordinal(), xr.world_size()
    ones = torch.ones(2, 3, device=device) * (rank + 1)
    assert xm.all_reduce(xm.REDUCE_SUM, ones).cpu().eq(3).all()
    assert xm.all_reduce("max", ones, scale=0.5).cpu().eq(1).all()
    listed = [ones.clone(), ones.sum()]
    assert xm.all_reduce(xm.REDUCE_SUM, listed, scale=1.0 / world) is listed
    assert listed[0].cpu().eq(1.5).all() and listed[1].item() == 9.0
    gathered = xm.all_gather(torch.full((1, 2), float(rank), device=device), dim=0)
    assert gathered.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert xm.all_gather(ones, groups=[[0], [1]]).shape == (2, 3)
    mine = torch.arange(4.0, device=device) + rank
    part = xm.reduce_scatter("sum", mine, 1.0, scatter_dim=0, shard_count=world)
    assert part.tolist() == [[1.0, 3.0], [5.0, 7.0]][rank]
    swapped = xm.all_to_all(mine, split_dimension=0, concat_dimension=0, split_count=world)
    assert swapped.tolist() == [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]][rank]
    ring = [[k, (k + 1) % world] for k in range(world)]
    assert xm.collective_permute(mine[:1], pairs=ring).tolist() == [[1.0], [0.0]][rank]
    xm.collective_broadcast([mine], root_ordinal=1)
    assert mine.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert [t.tolist() for t in xm.all_gather_bucketized([mine[:1], mine[1:2]])] == [
        [1.0] * 2,
        [2.0] * 2,
    ]
    host_side(rank, device)
    gradients(rank, device)


def host_side(rank, device):
    assert xm.rendezvous("here", bytes([rank])) == [b"\x00", b"\x01"]
    assert xm.xla_rendezvous(str(rank).encode()) == [b"0", b"1"]
    assert xm.mesh_reduce("mean", float(rank), lambda all: sum(all) / len(all)) == 0.5
    sums = xm.mesh_reduce("sum", torch.ones(2, device=device) * rank, lambda all: sum(all))
    assert sums.device.type == "cpu" and sums.tolist() == [1.0, 1.0]
    value = xm.do_on_ordinals(lambda t: t.sum().item(), data=(torch.ones(3, device=device),))
    assert value == (3.0 if rank == 0 else None)


def gradients(rank, device):
    w = torch.ones(3, device=device, requires_grad=True)
    (w * (rank + 1)).sum().backward()
    optimizer = torch.optim.SGD([w], lr=1.0)
    xm.optimizer_step(optimizer, barrier=True)
    assert w.tolist() == [-0.5] * 3
    x = torch.full((2, 2), float(rank), device=device, requires_grad=True)
    xf.all_gather(x).sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0]] * 2
    norm = xf.SyncBatchNorm(2).to(device)
    torch.manual_seed(0)
    everyone = torch.rand(8, 2, 3)
    whole = torch.nn.BatchNorm1d(2)(everyone)
    part = norm(everyone[4 * rank : 4 * rank + 4].to(device))
    torch.testing.assert_close(part.detach().cpu(), whole[4 * rank : 4 * rank + 4].detach())


def square(x):
    return xr.global_ordinal(), x * x


if __name__ == "__main__":
    xmp.spawn(exchange, args=(), nprocs=2, start_method="fork")
    found = pjrt.run_multiprocess(square, 3, start_method="fork")
    assert found == {0: (0, 9), 1: (1, 9)}
    assert torch_xla.launch(square, args=(), debug_single_process=True)[0][1] == 0
