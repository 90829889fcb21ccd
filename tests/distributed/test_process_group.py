"""Every call of torch.distributed on lazy tensors, with two ranks over the backend "ltc"."""

import copy
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.distributed import lazy_multiprocessing
from ltc.distributed.c10d import group_calls
from ltc.errors import PeerFailure, Unsupported
from ltc.training_loop import steps
from tests.distributed.ranks import ROOT, test_on_all_ranks  # noqa: F401
from tests.distributed.training import sums_of_two_groups

RANKS = 2  # what is sent to one other rank, or in unequal parts, is written for a pair
DEVICE = "ltc:0"
DEVICES = 2  # of each rank: groups work on either
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def numbers(rank: int, *shape: int) -> torch.Tensor:
    """Other numbers on every rank, on the CPU."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(rank)) + 0.5


def same(on_ltc: torch.Tensor, on_cpu: torch.Tensor) -> None:
    assert on_ltc.device.type == "ltc"
    # gloo runs underneath in both cases, so nothing is rounded differently
    torch.testing.assert_close(on_ltc.detach().cpu(), on_cpu, rtol=0, atol=0)


def on_both(call, *tensors: torch.Tensor) -> None:
    """The same call on CPU tensors and on lazy copies leaves the same in all of them."""
    copies = [tensor.to(DEVICE) for tensor in tensors]
    call(*tensors)
    call(*copies)
    for tensor, lazy in zip(tensors, copies):
        same(lazy, tensor)


# --- collectives ------------------------------------------------------------------------------


def check_all_reduce_takes_every_operation(rank, world):
    for name in OPERATIONS:
        on_both(lambda x: dist.all_reduce(x, op=getattr(dist.ReduceOp, name)), numbers(rank, 3, 2))


def check_all_reduce_takes_bits(rank, world):
    for name in ("BAND", "BOR", "BXOR"):
        on_both(
            lambda x: dist.all_reduce(x, op=getattr(dist.ReduceOp, name)),
            torch.tensor([rank + 1, 3 - rank], dtype=torch.int32),
        )


def check_all_reduce_takes_many_dtypes(rank, world):
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        on_both(dist.all_reduce, (numbers(rank, 5) * 4).to(dtype))


def check_a_collective_writes_through_a_view(rank, world):
    base = torch.zeros(4, 3, device=DEVICE)
    dist.all_reduce(base[1:3].add_(rank + 1))
    assert base.cpu().tolist() == [[0] * 3, [3] * 3, [3] * 3, [0] * 3]


def check_broadcast_does_not_look_at_what_others_hold(rank, world):
    x = numbers(rank, 4) if rank == 1 else torch.full((4,), float("nan"))
    on_both(lambda x: dist.broadcast(x, 1), x)


def check_broadcast_carries_any_dtype(rank, world):
    for dtype in (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn):
        x = (numbers(rank, 6) * 3).to(torch.int32).to(torch.float32).to(dtype).to(DEVICE)
        dist.broadcast(x, 0)
        expected = (numbers(0, 6) * 3).to(torch.int32).to(torch.float32).to(dtype)
        assert x.cpu().view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


def check_all_gather(rank, world):
    on_both(lambda x, a, b: dist.all_gather([a, b], x), numbers(rank, 2, 3), *torch.zeros(2, 2, 3))


def check_all_gather_of_scalars(rank, world):
    on_both(lambda x, a, b: dist.all_gather([a, b], x), numbers(rank).clone(), *torch.zeros(2))


def check_all_gather_into_tensor_joins_or_stacks(rank, world):
    on_both(
        lambda x, out: dist.all_gather_into_tensor(out, x), numbers(rank, 2, 3), torch.zeros(4, 3)
    )
    stacked = torch.zeros(2, 2, 3, device=DEVICE)  # which gloo refuses on the CPU
    dist.all_gather_into_tensor(stacked, numbers(rank, 2, 3).to(DEVICE))
    same(stacked, torch.stack([numbers(0, 2, 3), numbers(1, 2, 3)]))


def check_reduce_scatter(rank, world):
    on_both(
        lambda a, b, out: dist.reduce_scatter(out, [a, b]),
        numbers(rank, 3),
        numbers(9, 3),
        torch.zeros(3),
    )


def check_reduce_scatter_tensor(rank, world):
    for name in ("SUM", "AVG", "MAX"):
        on_both(
            lambda x, out: dist.reduce_scatter_tensor(out, x, op=getattr(dist.ReduceOp, name)),
            numbers(rank, 4, 3),
            torch.zeros(2, 3),
        )


def check_what_cannot_be_scattered_in_equal_parts_is_refused(rank, world):
    source, out = torch.ones(15, device=DEVICE), torch.zeros(7, device=DEVICE)
    with pytest.raises(ValueError, match=r"15 elements, \[15\], for 2 ranks .* of 7 elements each"):
        dist.reduce_scatter_tensor(out, source)
    assert out.tolist() == [0.0] * 7


def check_reduce_scatter_takes_a_list_of_unequal_parts(rank, world):
    on_both(
        lambda a, b, out: dist.reduce_scatter(out, [a, b]),
        numbers(rank, 2, 2),
        numbers(rank + 5, 3),
        torch.zeros(2, 2) if rank == 0 else torch.zeros(3),
    )


def check_what_one_rank_can_see_is_refused_before_the_others_are_met(rank, world):
    def zeros(*sizes):
        return [torch.zeros(size, device=DEVICE) for size in sizes]

    x = numbers(rank, 3).to(DEVICE)
    for root in (2, -1):
        with pytest.raises(ValueError, match=f"rank {root}: the group has ranks 0 to 1"):
            dist.broadcast(x, root)
        with pytest.raises(ValueError, match=f"rank {root}: the group has"):
            functional.broadcast(x, root, dist.group.WORLD)
    for sizes in ((3,), (3, 3, 3)):
        with pytest.raises(ValueError, match=rf"list of {len(sizes)} tensor.* 2 ranks"):
            dist.all_gather(zeros(*sizes), x)
        with pytest.raises(ValueError, match=rf"list of {len(sizes)} tensor.* 2 ranks"):
            dist.reduce_scatter(x, zeros(*sizes))
    with pytest.raises(ValueError, match=r"output of 2 elements, \[2\], for a result of 3"):
        dist.all_gather(zeros(2, 3), x)
    with pytest.raises(ValueError, match=r"output of 3 elements, \[3\], for a result of 4"):
        dist.reduce_scatter(x, zeros(4, 4))
    same(x, numbers(rank, 3))


def check_parts_and_types_that_do_not_fit_are_refused(rank, world):
    x = numbers(rank, 4).to(DEVICE)
    for splits in ([6, -2], [1, 2], [4]):
        with pytest.raises(ValueError, match=r"parts of \[.*\] rows of a tensor \[4\] among 2"):
            dist.all_to_all_single(torch.zeros_like(x), x, splits, splits)
    with pytest.raises(ValueError, match=r"a tensor \[3\] among 2 ranks"):
        dist.all_to_all_single(torch.zeros(3, device=DEVICE), x[:3])
    with pytest.raises(ValueError, match="output of torch.int32 for a result of torch.float32"):
        dist.all_gather_into_tensor(torch.zeros(8, dtype=torch.int32, device=DEVICE), x)
    with pytest.raises(ValueError, match="output of torch.float64 for a result of torch.float32"):
        dist.reduce_scatter_tensor(torch.zeros(2, dtype=torch.float64, device=DEVICE), x)
    with pytest.raises(ValueError, match=r"all_gather: an output of 7 elements, \[7\], .* of 8"):
        dist.all_gather_into_tensor(torch.zeros(7, device=DEVICE), x)
    with pytest.raises(ValueError, match=f"rank {rank} sends itself . rows and receives 2"):
        dist.all_to_all_single(torch.zeros(4, device=DEVICE), x, [2, 2], [1, 3])
    same(x, numbers(rank, 4))


def check_functional_parts_that_do_not_fit_are_refused_at_the_call(rank, world):
    x, group = numbers(rank, 4).to(DEVICE), dist.group.WORLD
    with pytest.raises(ValueError, match=r"parts of \[1, 1\] rows of a tensor \[4\] among 2"):
        functional.all_to_all_single(x, [2, 2], [1, 1], group)
    for outputs in ([4], [5, -1]):
        with pytest.raises(ValueError, match=r"parts of \[.*\] rows from 2 ranks"):
            functional.all_to_all_single(x, outputs, [2, 2], group)
    found = functional.all_to_all_single(x, [2, 2], [2, 2], group)
    same(found + 0, torch.cat([numbers(r, 4)[2 * rank : 2 * rank + 2] for r in range(world)]))


def check_all_to_all_single_in_equal_and_in_unequal_parts(rank, world):
    on_both(lambda x, out: dist.all_to_all_single(out, x), numbers(rank, 4, 2), torch.zeros(4, 2))
    inputs, outputs = ([1, 3], [1, 2]) if rank == 0 else ([2, 1], [3, 1])
    on_both(
        lambda x, out: dist.all_to_all_single(out, x, outputs, inputs),
        numbers(rank, sum(inputs), 2),
        torch.zeros(sum(outputs), 2),
    )


def check_all_to_all(rank, world):
    """Lists, which gloo of torch 2.11 does not take: what must come is told without it."""

    def sent(by: int, to: int) -> torch.Tensor:
        shape = (2 + to, 3) if by else (1 + to,)  # each may be of a size of its own
        return numbers(10 * by + to, *shape)

    expected = [sent(other, rank) for other in range(world)]
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.float8_e5m2):
        mine = [sent(rank, other).to(dtype).to(DEVICE) for other in range(world)]
        outputs = [torch.zeros_like(x, dtype=dtype, device=DEVICE) for x in expected]
        outputs[1] = outputs[1].t().contiguous().t()
        dist.all_to_all(outputs, mine)
        for output, x in zip(outputs, expected):
            same(output, x.to(dtype))


def check_all_to_all_of_scalars_and_of_nothing(rank, world):
    mine = [torch.tensor(float(10 * rank + other), device=DEVICE) for other in range(world)]
    outputs = [torch.zeros((), device=DEVICE) for _ in range(world)]
    dist.all_to_all(outputs, mine)
    assert [x.item() for x in outputs] == [10 * other + rank for other in range(world)]
    dist.all_to_all([x.view(1)[:0] for x in outputs], [x.view(1)[:0] for x in mine])


def check_all_to_all_needs_one_tensor_of_each(rank, world):
    x = numbers(rank, 3).to(DEVICE)
    for outputs, inputs in (([x] * 3, [x] * 2), ([x] * 2, [x])):
        with pytest.raises(ValueError, match="all_to_all got a list of . tensor.* 2 ranks"):
            dist.all_to_all(outputs, inputs)


def check_reduce_leaves_the_other_ranks_tensor_alone(rank, world):
    x = numbers(rank, 3).to(DEVICE)
    dist.reduce(x, 1)
    same(x, numbers(0, 3) + numbers(1, 3) if rank == 1 else numbers(0, 3))


def check_gather_and_scatter(rank, world):
    x = numbers(rank, 3).to(DEVICE)
    parts = [torch.zeros(3, device=DEVICE) for _ in range(world)] if rank == 0 else None
    dist.gather(x, parts, 0)
    back = torch.zeros(3, device=DEVICE)
    dist.scatter(back, parts, 0)
    same(back, numbers(rank, 3))


def check_coalesced_calls(rank, world):
    tensors = [numbers(rank, 3).to(DEVICE), numbers(rank, 2).to(DEVICE)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor, size in zip(tensors, (3, 2)):
        same(tensor, numbers(0, size) + numbers(1, size))


# --- point to point ---------------------------------------------------------------------------


def check_send_and_receive(rank, world):
    x = numbers(rank, 3).to(DEVICE)
    if rank == 0:
        dist.send(x * 1, 1)
    else:
        dist.recv(x, 0)
    same(x, numbers(0, 3))


def check_receive_from_anyone_tells_from_whom(rank, world):
    x = torch.zeros(3, device=DEVICE)
    if rank == 0:
        dist.send(numbers(0, 3).to(DEVICE), 1)
    else:
        assert dist.recv(x) == 0
        same(x, numbers(0, 3))


def check_both_may_receive_before_they_send(rank, world):
    mine, theirs = numbers(rank, 3).to(DEVICE), torch.zeros(3, device=DEVICE)
    calls = [dist.P2POp(dist.irecv, theirs, 1 - rank), dist.P2POp(dist.isend, mine, 1 - rank)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    same(theirs, numbers(1 - rank, 3))


def check_what_is_sent_may_wait_for_a_recorded_collective(rank, world):
    x = numbers(rank, 3).to(DEVICE)
    dist.all_reduce(x)
    if rank == 0:
        dist.recv(x, 1)
    else:
        dist.send(x, 0)
    same(x, numbers(0, 3) + numbers(1, 3))


def check_a_pipeline_of_two_stages(rank, world):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    x, target, losses = torch.ones(4, 4), torch.zeros(4, 4), []
    stage = PipelineStage(copy.deepcopy(layers[rank]).to(DEVICE), rank, world, torch.device(DEVICE))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    if rank == 0:
        schedule.step(x.to(DEVICE))
    else:
        schedule.step(target=target.to(DEVICE), losses=losses)
    for chunk in x.chunk(2):
        (torch.nn.functional.mse_loss(layers[1](layers[0](chunk)), target[:2]) / 2).backward()
    torch.testing.assert_close(stage.submod.weight.grad.cpu(), layers[rank].weight.grad)


# --- objects, groups, barriers ----------------------------------------------------------------


def check_whole_numbers_may_be_there_on_one_rank_and_pending_on_another(rank, world):
    for shape in ((10,), (2, 5)):
        numbers_there = torch.arange(10).reshape(shape)
        x = (
            numbers_there.to(DEVICE)
            if rank == 0
            else torch.zeros_like(numbers_there, device=DEVICE)
        )
        dist.broadcast(x, 0)
        same(x, numbers_there)
    mine = torch.tensor([rank]).to(DEVICE) if rank == 0 else torch.full((1,), rank, device=DEVICE)
    parts = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    joined = torch.empty(world, dtype=torch.int64, device=DEVICE)
    dist.all_gather_into_tensor(joined, mine)
    assert [x.item() for x in parts] == joined.tolist() == list(range(world))


def check_objects_travel(rank, world):
    found = [None] * world
    dist.all_gather_object(found, {"rank": rank, "tensor": numbers(rank, 2).to(DEVICE)})
    assert [f["rank"] for f in found] == [0, 1]
    same(found[1]["tensor"], numbers(1, 2))
    objects = [rank, "of", rank]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [1, "of", 1]
    received = [None]
    dist.scatter_object_list(received, ["a", "b"] if rank == 0 else None, src=0)
    assert received == ["ab"[rank]]


def check_groups_have_their_own_ranks(rank, world):
    alone = [dist.new_group([r]) for r in range(world)]
    x = torch.full((2,), float(rank), device=DEVICE)
    dist.all_reduce(x, group=alone[rank])
    dist.broadcast(x, rank, group=alone[rank])
    assert x.cpu().tolist() == [rank, rank]
    assert dist.get_rank(alone[rank]) == 0


def check_other_backends_serve_lazy_tensors_too(rank, world):
    for backend in ("gloo", "cpu:gloo,ltc:ltc", "cpu:gloo,ltc:gloo", "ltc:ltc"):
        group = dist.new_group(backend=backend)
        x = torch.ones(2, device=DEVICE)
        dist.all_reduce(x, group=group)
        assert x.cpu().tolist() == [2, 2], backend


def check_barriers(rank, world):
    dist.barrier()
    dist.barrier(device_ids=[0])
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()


def check_a_barrier_runs_what_was_recorded_before_it(rank, world):
    x = torch.ones(2, device=DEVICE)
    dist.all_reduce(x)
    if rank == 0:
        assert x.cpu().tolist() == [2, 2]  # waits for rank 1, which goes straight to the barrier
    dist.barrier()


def check_a_cpu_collective_comes_after_those_recorded_before_it(rank, world):
    x, count = torch.ones(2, device=DEVICE), torch.ones(1)
    dist.all_reduce(x)
    if rank == 0:
        x.cpu()
    with torch.inference_mode():
        dist.all_reduce(count)
    assert count.item() == 2


def check_a_functional_cpu_collective_comes_after_those_recorded_before_it(rank, world):
    x, count = torch.ones(2, device=DEVICE), torch.ones(1)
    dist.all_reduce(x)
    if rank == 0:
        x.cpu()  # waits for rank 1, which goes straight to the next
    total = functional.all_reduce(count, "sum", dist.group.WORLD)
    assert functional.wait_tensor(total).item() == world


def check_work_has_a_future(rank, world):
    x = torch.ones(2, device=DEVICE)
    work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert work.wait() and work.is_completed()
    assert doubled.wait().cpu().tolist() == [4, 4]


# --- recording --------------------------------------------------------------------------------


def check_work_is_waited_for_with_a_timeout(rank, world):
    x, out = torch.ones(2, device=DEVICE), torch.empty(2 * world, device=DEVICE)
    for work in (
        dist.all_reduce(x, async_op=True),
        dist.all_gather_into_tensor(out, x, async_op=True),
        dist.reduce(x, 0, async_op=True),  # not recorded
        dist.barrier(async_op=True),
    ):
        assert work.wait(timedelta(seconds=30))
        assert work.wait(timeout=timedelta(seconds=30))
    assert out.tolist() == [world] * 2 * world


def check_collectives_are_recorded_not_run(rank, world):
    group = dist.group.WORLD
    x = numbers(rank, 4).to(DEVICE)
    y = functional.all_reduce(x * 2, "sum", group)
    z = functional.all_gather_tensor(y + 1, 0, group)
    w = functional.reduce_scatter_tensor(z, "avg", 0, group)
    dist.all_reduce(x)
    with metrics.counted() as grown:
        total = (w + 0).sum() + x.sum()
        steps.mark()
    assert grown.get("UncachedCompile", 0) + grown.get("CachedCompile", 0) == 1, dict(grown)
    both = numbers(0, 4) + numbers(1, 4)
    torch.testing.assert_close(total.cpu(), (2 * both + 1).sum() + both.sum())


def check_functional_collectives_equal_those_of_the_cpu(rank, world):
    group = dist.group.WORLD
    for call in (
        lambda x: functional.all_reduce(x, "max", group),
        lambda x: functional.all_gather_tensor(x, 1, group),
        lambda x: functional.reduce_scatter_tensor(x, "sum", 1, group),
        lambda x: functional.broadcast(x, 1, group),
        lambda x: functional.all_to_all_single(x, None, None, group),
        lambda x: functional.all_reduce_coalesced([x, x + 1], "sum", group)[1],
    ):
        x = numbers(rank, 2, 4)
        same(call(x.to(DEVICE)) + 0, call(x) + 0)


def check_functional_collectives_have_gradients(rank, world):
    group = dist.group.WORLD
    found = []
    for device in ("cpu", DEVICE):
        x = numbers(rank, 2, 4).to(device).requires_grad_()
        y = functional.all_gather_tensor_autograd(x, 0, group)
        z = functional.reduce_scatter_tensor_autograd(y * y, "sum", 0, group)
        (z**2).sum().backward()
        found.append(x.grad)
    same(found[1], found[0])


def check_what_nobody_reads_runs_with_the_step(rank, world):
    x = torch.ones(3, device=DEVICE)
    functional.all_reduce(x, "sum", dist.group.WORLD)
    if rank == 1:
        functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD)).cpu()
    else:
        functional.all_reduce(x, "sum", dist.group.WORLD)
        steps.mark()


def check_reading_in_different_orders_does_not_hang(rank, world):
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for _ in range(5):
        a, b = torch.full((2,), 1.0, device=DEVICE), torch.full((2,), 2.0, device=DEVICE)
        dist.all_reduce(a, group=first)
        dist.all_reduce(b, group=second)
        for x, expected in [(a, 2), (b, 4)][:: 1 if rank else -1]:
            assert x.cpu().tolist() == [expected] * 2


def check_a_collective_on_a_second_device(rank, world):
    x = torch.ones(2, device="ltc:1")
    dist.all_reduce(x)
    assert x.cpu().tolist() == [2, 2]


# --- transport ------------------------------------------------------------------------------------


def check_ranks_of_one_host_exchange_through_memory(rank, world):
    group, x = dist.new_group(), torch.ones(300_000, device=DEVICE) * (rank + 1)
    dist.all_reduce(x, group=group)
    whole, share = torch.zeros(world, device=DEVICE), torch.zeros(3, device=DEVICE)
    dist.all_gather_into_tensor(whole, x[:1], group=group)
    dist.reduce_scatter_tensor(share, torch.ones(3 * world, device=DEVICE), group=group)
    assert whole.cpu().tolist() == [3] * 2 and share.cpu().tolist() == [2] * 3
    calls = group_calls.of(group)
    assert calls.in_memory
    done = calls.communicator.count
    dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
    assert x.cpu().unique().tolist() == [3]
    assert calls.communicator.count == done + 1
    dist.destroy_process_group(group)
    assert group_calls.of(group) is None


def check_ranks_of_several_hosts_exchange_over_the_backend(rank, world):
    with config.override(LTC_TRANSPORT="hosts"):
        group, x = dist.new_group(), torch.ones(3, device=DEVICE)
        dist.all_reduce(x, group=group)
        assert x.cpu().tolist() == [2] * 3
        assert not group_calls.of(group).in_memory


# --- errors -----------------------------------------------------------------------------------


def check_an_average_of_whole_numbers_is_cut(rank, world):
    x = torch.tensor([rank + 2, -rank - 2], device=DEVICE)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [2, -2]


def check_a_reduction_that_gloo_lacks_says_so(rank, world):
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(Unsupported, match="PREMUL_SUM"):
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(2.0))


def check_a_reduction_that_a_dtype_has_not_ends_nothing(rank, world):
    z, x = torch.ones(4, dtype=torch.complex64, device=DEVICE), torch.ones(4, device=DEVICE)
    with pytest.raises(RuntimeError, match="min needs numbers that have an order"):
        dist.reduce_scatter_tensor(z[:2], z, dist.ReduceOp.MIN)
    with pytest.raises(RuntimeError, match="bxor needs integers"):
        dist.all_reduce(x, dist.ReduceOp.BXOR)
    with pytest.raises(RuntimeError, match="avg needs numbers, not torch.bool"):
        dist.all_reduce(x > 0, dist.ReduceOp.AVG)  # gloo refuses it too, and NCCL
    dist.all_reduce(x)
    assert x.tolist() == [world] * 4


def check_an_error_while_it_runs_names_the_collective_and_the_line(rank, world):
    group = dist.new_group()
    x = torch.ones(3, dtype=torch.int16, device=DEVICE)  # gloo does not know the dtype
    y = functional.all_reduce(x, "bxor", group)
    with pytest.raises(RuntimeError) as caught:
        (y + 0).cpu()
    notes = " ".join(caught.value.__notes__)
    assert "all_reduce bxor" in notes and "test_process_group.py" in notes, notes


def check_a_monitored_barrier_names_who_is_missing(rank, world):
    group = dist.new_group()
    if rank == 0:
        with pytest.raises(RuntimeError, match="[Rr]ank 1"):
            dist.monitored_barrier(group, timeout=timedelta(seconds=1))


def check_a_groups_own_timeout_ends_a_wait_in_memory(rank, world):
    groups = [dist.new_group(timeout=timedelta(seconds=5)) for _ in range(2)]
    x = torch.ones(3, device=DEVICE)
    dist.barrier()
    dist.all_reduce(x, group=groups[0])
    assert x.tolist() == [2.0] * 3
    if rank == 0:
        for group in groups:  # one that has exchanged before, and one that has not
            y = torch.ones(3, device=DEVICE)
            dist.all_reduce(y, group=group)
            text = r"Replica\(s\) 1 did not enter within 5 s \(the timeout of its process group\)"
            with pytest.raises(PeerFailure, match=text):
                y.cpu()


def check_a_timeout_that_nobody_gave_is_that_of_ltc(rank, world):
    assert group_calls.of(dist.new_group()).communicator.limit_seconds is None


def check_ltm_goes_by_the_rank_and_size_that_the_group_was_given(rank, world):
    assert (ltm.xrt_world_size(), ltm.get_ordinal(), ltm.is_master_ordinal()) == (
        world,
        rank,
        rank == 0,
    )
    total = ltm.all_reduce("sum", torch.full((2,), rank + 1.0, device=DEVICE))
    assert total.tolist() == [3.0, 3.0]


def test_processes_that_ltc_started_find_each_other():
    with config.override(LTC_NUM_DEVICES=1):
        assert lazy_multiprocessing.spawn(sums_of_two_groups, nprocs=2) == [[6.0, 6.0]] * 2


def of_a_group_without_a_name(rank):
    store = dist.HashStore()
    dist.init_process_group(rank=0, world_size=1, store=store)
    try:
        losses = []
        for device in ("cpu", DEVICE):
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1).to(device))
            loss = model(torch.ones(2, 3, device=device)).sum()
            loss.backward()
            losses.append(loss.item())
        return losses
    finally:
        dist.destroy_process_group()


def test_a_model_of_either_device_is_wrapped_by_a_group_without_a_backends_name():
    ((plain, lazy),) = lazy_multiprocessing.spawn(of_a_group_without_a_name, nprocs=1)
    assert lazy == pytest.approx(plain)


def test_torch_picks_a_backend_for_the_device():
    assert dist.get_default_backend_for_device("ltc") == "ltc"
    assert ltc.device_count() >= 1


def test_ranks_of_a_mesh_may_read_in_any_order():
    command = [sys.executable, "-W", "ignore", "scripts/cluster/mesh_order.py", "--runs", "10"]
    command += [
        "--limit",
        "900",
    ]  # four processes import torch within it, on however busy a machine
    found = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, text=True, capture_output=True
    )
    assert "0 hangs" in found.stdout, found.stdout + found.stderr
