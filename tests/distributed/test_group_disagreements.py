"""Process groups whose ranks call other things: one report on all, for each call and each way of gloo.

Each check has a group of its own, since a group in which ranks disagree is over.
"""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ltc import config
from ltc.distributed.c10d import group_calls
from ltc.distributed.transport import status_board
from ltc.errors import PeerFailure
from tests.distributed.ranks import test_on_all_ranks  # noqa: F401

RANKS = 3
DEVICE = "ltc:0"
LINE = os.path.basename(__file__)


def ones(elements: int = 4, dtype=torch.float32, device: str = DEVICE) -> torch.Tensor:
    return torch.full((elements,), 1, dtype=torch.float32).to(dtype).to(device)


def reading(call, *tensors) -> None:
    """Make a call that is recorded, and run it."""
    call(*tensors)
    tensors[0].cpu()


def lists(rank: int, group_rank: int, elements: int = 4) -> list | None:
    return [ones(elements) for _ in range(RANKS)] if rank == group_rank else None


def all_to_all(r, g):
    sent = [2, 1, 3] if r == 0 else [2, 2, 2]
    reading(lambda out: dist.all_to_all_single(out, ones(6), [2, 2, 2], sent, group=g), ones(6))


def reduce_scatter_of_parts(r, g):
    parts = [ones(n) for n in ((4, 4, 3) if r == 1 else (2, 4, 3))]
    reading(lambda out: dist.reduce_scatter(out, parts, group=g), ones(parts[r].numel()))


# What rank r does in the group g; rank 0 does otherwise than another one.
DIFFERENT = {
    "root of a reduce": lambda r, g: dist.reduce(ones(), r, group=g),
    "root of a gather": lambda r, g: dist.gather(ones(), lists(r, r), r, group=g),
    "root of a scatter": lambda r, g: dist.scatter(ones(), lists(r, r), r, group=g),
    "root of a broadcast": lambda r, g: reading(lambda x: dist.broadcast(x, r, group=g), ones()),
    "operation of a reduce": lambda r, g: dist.reduce(
        ones(), 0, (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[r > 0], group=g
    ),
    "sum or average": lambda r, g: reading(
        lambda x: dist.all_reduce(x, (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[r > 0], group=g), ones()
    ),
    "dtype of as many bytes": lambda r, g: dist.reduce(
        ones(dtype=(torch.int64, torch.float64)[r > 0]), 0, group=g
    ),
    "dtype of bytes that only move": lambda r, g: reading(
        lambda x: dist.broadcast(x, 0, group=g),
        ones(dtype=(torch.uint8, torch.float8_e4m3fn)[r > 0]),
    ),
    "length of a reduce": lambda r, g: dist.reduce(ones(4 + (r > 0)), 0, group=g),
    "length of a gather": lambda r, g: dist.gather(ones(4 + r), lists(r, 0, 4 + r), 0, group=g),
    "length on the CPU": lambda r, g: dist.all_reduce(ones(4 + r, device="cpu"), group=g),
    "length of a work": lambda r, g: dist.all_reduce(
        ones(4 + r, device="cpu"), group=g, async_op=True
    ).wait(),
    "parts of an all_to_all": all_to_all,
    "parts of a reduce_scatter": reduce_scatter_of_parts,
    "all_reduce against barrier": lambda r, g: (
        dist.barrier(group=g) if r else reading(lambda x: dist.all_reduce(x, group=g), ones())
    ),
    "barrier against reduce": lambda r, g: (
        dist.barrier(group=g) if r else dist.reduce(ones(), 0, group=g)
    ),
    "monitored barrier against barrier": lambda r, g: (
        dist.monitored_barrier(g) if r else dist.barrier(group=g)
    ),
    "objects": lambda r, g: (
        dist.all_gather_object([None] * RANKS, "x", group=g)
        if r
        else dist.broadcast_object_list(["a"], 0, group=g)
    ),
    "coalesced sums": lambda r, g: coalesced(2 + (r > 0), g),
}


def coalesced(count: int, group) -> None:
    tensors = [ones() for _ in range(count)]
    with dist._coalescing_manager(group):
        for x in tensors:
            dist.all_reduce(x, group=group)
    tensors[0].cpu()


def all_in(rank: int, world: int, call) -> None:
    """Each rank raises the report, with the line of each."""
    answer, status_board._ANSWER_SECONDS = status_board._ANSWER_SECONDS, 60.0
    try:
        with pytest.raises(PeerFailure) as caught:
            call()
    finally:
        status_board._ANSWER_SECONDS = answer
    texts = [None] * world
    dist.all_gather_object(texts, str(caught.value))
    assert len({text.partition("\nin ")[0] for text in texts}) == 1, texts
    assert LINE in texts[0], texts[0]


def check_ranks_that_differ_raise_one_report(rank, world):
    for what, call in DIFFERENT.items():
        group = dist.new_group()
        all_in(rank, world, lambda call=call, group=group: call(rank, group))
        print(what, "was found")


def check_ranks_of_several_hosts_that_differ_raise_one_report(rank, world):
    for what, call in DIFFERENT.items():
        with config.override(LTC_TRANSPORT="hosts"):
            group = dist.new_group()
        assert not group_calls.of(group).in_memory
        all_in(rank, world, lambda call=call, group=group: call(rank, group))
        print(what, "was found between hosts")


def check_the_first_call_of_a_group_may_be_any(rank, world):
    for call in (
        lambda g: dist.barrier(group=g),
        lambda g: dist.reduce(ones(), 1, group=g),
        lambda g: dist.all_reduce(ones(device="cpu"), group=g),
    ):
        group = dist.new_group()
        call(group)
        x = ones()
        dist.all_reduce(x, group=group)
        assert x.tolist() == [world] * 4


# --- messages ---------------------------------------------------------------------------------


def check_a_receiver_of_another_size_or_type_says_so(rank, world):
    for sent, taken in (
        (ones(4), ones(8)),
        (ones(8), ones(4)),
        (ones(4), ones(2, torch.float64)),
        (ones(4, device="cpu"), ones(5)),
        (ones(0), ones(1)),
    ):
        group = dist.new_group()
        if rank == 0:
            dist.send(sent, 1, group=group)
        elif rank == 1:
            expected = (
                f"Rank 0 has sent {sent.nbytes} bytes of {sent.dtype} to rank 1, which expects"
            )
            with pytest.raises(PeerFailure, match=expected):
                dist.recv(taken, 0, group=group)
        if rank != 1:
            with pytest.raises(PeerFailure, match="Rank 0 has sent"):
                dist.barrier(group=group)
        dist.barrier()


def check_messages_keep_their_order_and_their_tags(rank, world):
    after, before = (rank + 1) % world, (rank - 1) % world
    sizes, tags = (3, 0, 70_000, 1), (0, 5, 0, 5)
    sent = [torch.full((n,), float(10 * rank + k)) for k, n in enumerate(sizes)]
    for device in ("cpu", DEVICE):
        taken = [torch.zeros(n, device=device) for n in sizes]
        works = [dist.irecv(x, before, tag=tag) for x, tag in zip(taken, tags)]
        works += [dist.isend(x.to(device), after, tag=tag) for x, tag in zip(sent, tags)]
        for work in reversed(works):  # ranks send before they receive, and in another order
            work.wait()
        for k, x in enumerate(taken):
            assert x.cpu().tolist() == [10.0 * before + k] * sizes[k]


def check_both_may_wait_for_what_they_send_first(rank, world):
    if rank < 2:
        taken = torch.zeros(100_000, device=DEVICE)
        receiving = dist.irecv(taken, 1 - rank)
        dist.isend(torch.full((100_000,), float(rank), device=DEVICE), 1 - rank).wait()
        receiving.wait()
        assert taken[0].item() == 1 - rank
    dist.barrier()


def check_a_sender_that_does_not_come_is_named(rank, world):
    for transport in ("auto", "hosts"):
        with config.override(LTC_TRANSPORT=transport):
            group = dist.new_group(timeout=timedelta(seconds=2))
        if rank == 1:
            with pytest.raises(PeerFailure, match="did not enter within 2 s") as caught:
                dist.recv(ones(), 0, group=group)
            assert "receive of f32[4] from rank 0" in str(caught.value)
        dist.barrier()


# --- groups -----------------------------------------------------------------------------------


def check_works_of_several_groups_may_be_begun_in_any_order(rank, world):
    groups = [dist.new_group() for _ in range(3)]
    tensors = [torch.full((3,), float(k)) for k in range(3)]
    order = [(rank + k) % 3 for k in range(3)]
    works = [dist.all_reduce(tensors[k], group=groups[k], async_op=True) for k in order]
    for work in works:
        work.wait()
    assert [x[0].item() for x in tensors] == [0.0, 3.0, 6.0]


def check_groups_are_made_of_the_same_ranks_by_all(rank, world):
    # in a world of its own, as it is over then: a subgroup stands for it
    with pytest.raises(ValueError, match="duplicate"):
        dist.new_group([0, 0])
    assert dist.get_rank(dist.new_group([0, 1, 2])) == rank


def check_the_end_of_the_process_waits_for_no_group_that_is_over(rank, world):
    """gloo's destructors wait for calls that nobody answers: a run that has failed just ends."""
    dist.destroy_process_group = lambda: os._exit(0)
