"""What process groups leave behind when the world ends, and another one begins: nothing."""

import torch
import torch.distributed as dist

import ltc.core.lazy_model as ltm
from tests.distributed.ranks import test_on_all_ranks  # noqa: F401

RANKS = 3
DEVICE = "ltc:0"


def check_groups_after_the_end_of_the_world_are_others(rank, world):
    """torch numbers groups anew, so one of other ranks gets the name of an earlier one."""
    store = dist.distributed_c10d._get_default_store()
    for number, members in enumerate(([0, 2], [0, 1], [1, 2], [2, 0])):
        dist.destroy_process_group()
        dist.init_process_group(
            "ltc", store=dist.PrefixStore(f"world {number}", store), rank=rank, world_size=world
        )
        group = dist.new_group(members)
        if rank in members:
            x = torch.full((3,), rank + 1.0, device=DEVICE)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [sum(members) + 2.0] * 3
            y = torch.full((3,), rank + 1.0, device=DEVICE)
            dist.reduce(y, members[0], group=group)
            if number % 2:
                dist.destroy_process_group(group)
        again = dist.new_group(members)
        if rank in members:
            z = torch.ones(4, device=DEVICE)
            dist.all_reduce(z, group=again)
            assert z.tolist() == [2.0] * 4
        dist.barrier()


def check_a_world_of_other_ranks_counts_its_own_replicas(rank, world):
    store = dist.distributed_c10d._get_default_store()
    for number, members in enumerate(([0, 1], [2, 0], [2, 1, 0], [0, 1, 2])):
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        if rank in members:
            dist.init_process_group(
                "ltc",
                store=dist.PrefixStore(f"other world {number}", store),
                rank=members.index(rank),
                world_size=len(members),
            )
            for elements in (3, 70_000):
                total = ltm.all_reduce("sum", torch.full((elements,), rank + 1.0, device=DEVICE))
                assert total[0].item() == sum(members) + len(members)
            assert (ltm.xrt_world_size(), ltm.get_ordinal()) == (len(members), members.index(rank))
            assert ltm.rendezvous("all", b"%d" % rank) == [b"%d" % r for r in members]
