"""Collectives of a step among threads, a device each: what they compute, in which order, and errors."""

import copy
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.aten.call import Numbering
from ltc.aten.expansion import expand
from ltc.backends.llvm.compiling import prepared
from ltc.backends.llvm.schedule import planned_steps
from ltc.core import functions
from ltc.debug import metrics
from ltc.device.recording.tensors import state_of
from ltc.distributed import collectives
from ltc.distributed.transport import session
from ltc.distributed.transport.progress_thread import ProgressRunner
from ltc.errors import NotLazyTensor, PeerFailure
from ltc.ir import ops
from ltc.ir.collective import Collective
from ltc.ir.graph import Graph
from ltc.ir.loop_nest import Product
from ltc.passes import pipeline
from ltc.runtime.compile import live_calls

sys.path.insert(0, str(Path(__file__).parent))

from replicas import (
    LIMIT_SECONDS,
    in_threads,
    values,
    wait_until_others_are_in,
    whole_tables,
)

pytestmark = pytest.mark.devices(4)

REPLICAS = 4
REDUCTIONS = {
    "sum": lambda x: x.sum(0),
    "mul": lambda x: x.prod(0),
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
}


def draw(ordinal: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(ordinal), dtype=dtype)


def together(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.stack([draw(i, *shape, dtype=dtype) for i in range(REPLICAS)])


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("elements", [1, 5, 9_001, 300_001])
def test_all_reduce_reduces_what_every_replica_has(kind, elements):
    found = values(in_threads(lambda i, d: ltm.all_reduce(kind, draw(i, elements).to(d)).cpu()))
    expected = REDUCTIONS[kind](together(elements))
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(one, found[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_and_and_or_work_on_bits(dtype):
    numbers = [
        torch.tensor([6, 3, 0, 1]),
        torch.tensor([7, 1, 0, 0]),
        torch.tensor([2, 5, 1, 1]),
        torch.tensor([3, 3, 0, 1]),
    ]

    def reduce(i, d):
        x = numbers[i].to(dtype).to(d)
        return ltm.all_reduce(ltm.REDUCE_AND, x).cpu(), ltm.all_reduce(ltm.REDUCE_OR, x).cpu()

    both, either = numbers[0].to(dtype), numbers[0].to(dtype)
    for x in numbers[1:]:
        both, either = both & x.to(dtype), either | x.to(dtype)
    for found in values(in_threads(reduce)):
        assert torch.equal(found[0], both) and torch.equal(found[1], either)


def test_low_precision_sums_are_rounded_once():
    expected = together(1000, dtype=torch.float32).bfloat16().float().sum(0).bfloat16()
    found = values(
        in_threads(
            lambda i, d: ltm.all_reduce(
                "sum", draw(i, 1000, dtype=torch.float32).bfloat16().to(d)
            ).cpu()
        )
    )
    assert all(torch.equal(one, expected) for one in found)


def test_a_tensor_gives_a_new_one_and_a_list_is_reduced_in_place():
    def reduce(i, d):
        x, y = torch.ones(3, device=d), torch.ones(2, 2, device=d, dtype=torch.int64)
        new = ltm.all_reduce("sum", x)
        given = [x.clone(), y]
        same = ltm.all_reduce("sum", given, scale=0.5) is given
        return same, x.cpu(), new.cpu(), given[0].cpu(), given[1].cpu()

    for same, x, new, first, second in values(in_threads(reduce)):
        assert same and x.tolist() == [1] * 3 and new.tolist() == [4] * 3
        assert first.tolist() == [2] * 3 and second.tolist() == [[2, 2], [2, 2]]
        assert second.dtype == torch.int64


def test_one_replica_copies_and_does_not_scale():
    x = torch.ones(2, device="ltc")
    new = ltm.all_reduce("sum", x, scale=0.5)
    assert new is not x and new.tolist() == [1, 1]
    given = [x]
    assert ltm.all_reduce("sum", given, scale=0.5) is given and x.tolist() == [1, 1]


def test_an_unknown_reduction_is_named():
    with pytest.raises(RuntimeError, match="Invalid reduce type: avg"):
        ltm.all_reduce("avg", torch.ones(2, device="ltc"))


def test_groups_keep_to_themselves():
    groups = [[0, 2], [1, 3]]
    found = values(
        in_threads(
            lambda i, d: ltm.all_reduce(
                "sum", torch.full((2,), 10.0**i, device=d), groups=groups
            ).cpu()
        )
    )
    assert [one[0].item() for one in found] == [101, 1010, 101, 1010]


def test_groups_must_name_every_replica_once():
    found = in_threads(
        lambda i, d: ltm.all_reduce("sum", torch.ones(2, device=d), groups=[[0, 1], [2, 2]])
    )
    assert all(isinstance(one, ValueError) for one in found)


def test_all_gather_joins_in_ordinal_order():
    def gather(i, d):
        x = torch.full((2, 1), float(i), device=d)
        number = torch.tensor(float(i), device=d)
        return [ltm.all_gather(v, dim).cpu() for v, dim in ((x, 0), (x, -1), (number, 0))]

    for rows, columns, numbers in values(in_threads(gather)):
        assert rows.flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert columns.tolist() == [[0, 1, 2, 3]] * 2
        assert numbers.tolist() == [0, 1, 2, 3]


def test_reduce_scatter_gives_the_own_part_of_the_sum():
    def scatter(i, d):
        x = draw(i, 8, 6).to(d)
        one = ltm.reduce_scatter("sum", x, 0.5, 0, REPLICAS)
        many = ltm.reduce_scatter("sum", [x, 2 * x], 0.5, 0, REPLICAS)
        return one.cpu(), [m.cpu() for m in many]

    expected = 0.5 * together(8, 6).sum(0)
    for ordinal, (one, many) in enumerate(values(in_threads(scatter))):
        part = expected[2 * ordinal : 2 * ordinal + 2]
        torch.testing.assert_close(one, part)
        torch.testing.assert_close(many, [part, 2 * part])


def test_all_to_all_sends_part_j_to_member_j():
    def trade(i, d):
        return ltm.all_to_all(torch.arange(4.0, device=d).view(1, 4) + 10 * i, 1, 0, REPLICAS).cpu()

    for ordinal, one in enumerate(values(in_threads(trade))):
        assert one.flatten().tolist() == [ordinal + 10 * peer for peer in range(REPLICAS)]


def test_collective_permute_moves_along_pairs_and_fills_with_zeros():
    found = values(
        in_threads(
            lambda i, d: ltm.collective_permute(
                torch.full((2,), i + 1.0, device=d), [[0, 1], [1, 2], [3, 0]]
            ).cpu()
        )
    )
    assert [one[0].item() for one in found] == [4, 1, 2, 0]


def test_a_broadcast_does_not_look_at_what_the_others_held():
    def spread(i, d):
        x = torch.full((3,), 7.0 if i == 2 else float("nan"), device=d)
        y = torch.full((300_000,), i, device=d)
        ltm.collective_broadcast([x, y], root_ordinal=2)
        return x.cpu(), y.cpu()

    for x, y in values(in_threads(spread)):
        assert x.tolist() == [7] * 3 and (y == 2).all()


def test_broadcast_master_param_makes_models_equal():
    def spread(i, d):
        torch.manual_seed(i)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(d)
        ltm.broadcast_master_param(model)
        return [v.cpu() for v in model.state_dict().values()]

    found = values(in_threads(spread))
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0]))


def test_send_and_recv_pass_a_tensor_on():
    def relay(i, d):
        x = torch.full((5,), float(i), device=d)
        if i in (0, 1):
            return ltm.send(x, 0, target=i + 2)
        got = ltm.recv(x, 0, source=i - 2)
        return got.cpu(), x.cpu()

    found = values(in_threads(relay))
    assert [found[i][0][0].item() for i in (2, 3)] == [0, 1]
    assert found[3][1].tolist() == [1] * 5


def test_two_replicas_may_both_send_before_they_receive():
    def swap(i, d):
        for step in range(3):
            ltm.send(torch.full((5,), i + step, device=d), 7, target=1 - i)
            got = ltm.recv(torch.zeros(5, dtype=torch.int64, device=d), 7, source=1 - i)
            total = ltm.all_reduce("max", got)  # the pair's order and the group's do not mix
        return got.tolist(), total.tolist()

    assert values(in_threads(swap, 2)) == [([3] * 5, [3] * 5), ([2] * 5, [3] * 5)]


def test_a_receiver_that_expects_another_shape_hears_of_it():
    def swap(i, d):
        ltm.send(torch.ones(2 + i, device=d), 7, target=1 - i)
        return ltm.recv(torch.zeros(3, device=d), 7, source=1 - i).tolist()

    _, second = in_threads(swap, 2)
    assert isinstance(second, PeerFailure)
    assert "Replica 1 noticed it in a message from replica 0" in str(second)


# --- what is refused, with one replica as with several --------------------------------------------

_ABSENT = "names replica 4: ordinals are 0 to"
WRONG_CALLS = {
    "permute to": (lambda x: ltm.collective_permute(x, [(0, 4)]), ValueError, _ABSENT),
    "permute from": (lambda x: ltm.collective_permute(x, [(4, 0)]), ValueError, _ABSENT),
    "permute twice": (
        lambda x: ltm.collective_permute(x, [(0, 0), (0, 0)]),
        ValueError,
        "sends or receives twice",
    ),
    "send": (lambda x: ltm.send(x, 0, target=4), ValueError, _ABSENT),
    "recv": (lambda x: ltm.recv(x, 0, source=4), ValueError, _ABSENT),
    "send to itself": (
        lambda x: ltm.send(x, 0, target=ltm.get_ordinal()),
        ValueError,
        "which is this one",
    ),
    "recv from itself": (
        lambda x: ltm.recv(x, 0, source=ltm.get_ordinal()),
        ValueError,
        "which is this one",
    ),
    "reduce group": (lambda x: ltm.all_reduce("sum", x, groups=[[4]]), ValueError, "exactly once"),
    "gather group": (lambda x: ltm.all_gather(x, groups=[[4]]), ValueError, "exactly once"),
    "broadcast group": (
        lambda x: ltm.collective_broadcast([x], groups=[[4]]),
        ValueError,
        "exactly once",
    ),
    "host group": (
        lambda x: collectives.host_all_reduce(torch.ones(2), groups=[[4]]),
        ValueError,
        "exactly once",
    ),
    "gather dim": (lambda x: ltm.all_gather(x, dim=5), IndexError, "but got 5"),
    "root": (lambda x: ltm.collective_broadcast([x], 4), ValueError, "root 4 is none"),
    "min of complex": (lambda x: ltm.all_reduce("min", x + 1j), RuntimeError, "have an order"),
    "max of complex": (lambda x: ltm.all_reduce("max", [x + 1j]), RuntimeError, "have an order"),
}
ON_THE_HOST = {
    "all_reduce": lambda x: ltm.all_reduce("sum", x),
    "all_reduce of a list": lambda x: ltm.all_reduce("sum", [x]),
    "all_gather": lambda x: ltm.all_gather(x),
    "reduce_scatter": lambda x: ltm.reduce_scatter("sum", x, 1.0, 0, collectives.replica_count()),
    "all_to_all": lambda x: ltm.all_to_all(x, 0, 0, collectives.replica_count()),
    "collective_permute": lambda x: ltm.collective_permute(x, [(0, 0)]),
    "collective_broadcast": lambda x: ltm.collective_broadcast([x]),
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_refused_before_anything_is_exchanged(name, replicas):
    call, error, text = WRONG_CALLS[name]

    def attempt(i, d):
        x = torch.ones(2, device=d)
        with pytest.raises(error, match=text):
            call(x)
        return ltm.all_reduce("sum", x).tolist()  # the replicas are together still

    assert values(in_threads(attempt, replicas)) == [[replicas] * 2] * replicas


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ON_THE_HOST)
def test_a_cpu_tensor_is_refused(name, replicas):
    def attempt(i, d):
        with pytest.raises(NotLazyTensor, match="not a lazy tensor"):
            ON_THE_HOST[name](torch.ones(2))

    values(in_threads(attempt, replicas))


# --- order and laziness -----------------------------------------------------------------------


def test_nothing_runs_before_a_cut_and_then_everything_read_or_not():
    def record(i, d):
        ltm.all_reduce("sum", torch.ones(2, device=d))  # nobody reads it
        kept = ltm.all_gather(torch.ones(2, device=d))
        pending = state_of(kept).buffer is None
        if i % 2:  # these end their step without a read, the others by reading
            ltm.mark_step(d)
        return pending, kept.cpu().tolist()

    for pending, kept in values(in_threads(record)):
        assert pending and kept == [1.0] * 8


def test_replicas_may_read_in_different_orders():
    def read(i, d):
        groups = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
        sums = [
            ltm.all_reduce("sum", torch.full((2,), float(i), device=d), groups=g) for g in groups
        ]
        order = [0, 1] if i in (0, 3) else [1, 0]
        found = {k: sums[k].cpu()[0].item() for k in order}
        return found[0], found[1]

    for _ in range(5):
        assert values(in_threads(read)) == [(1, 2), (1, 4), (5, 2), (5, 4)]


def test_a_repeated_step_with_collectives_compiles_once_for_all_devices():
    def train(i, d):
        x = torch.ones(3, device=d)
        for _ in range(3):
            x = ltm.all_reduce("sum", x, 0.25) + 1
            ltm.mark_step(d)
        return x.cpu().tolist()

    with metrics.counted() as grown:
        found = values(in_threads(train))
    assert found == [[4.0] * 3] * REPLICAS
    assert grown["UncachedCompile"] <= 2


# --- gradients --------------------------------------------------------------------------------


def batch(ordinal: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = draw(ordinal, 6, 5)
    return x, draw(ordinal + 100, 6, 3)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def train_on(module: nn.Module, x, y, optimizer, step) -> None:
    optimizer.zero_grad()
    (module(x) - y).square().mean().backward()
    step(optimizer)


@pytest.mark.parametrize("bucket_megabytes", [4.0, 1e-4])
def test_k_replicas_train_as_one_with_k_times_the_batch(bucket_megabytes):
    initial = model()

    def train(i, d):
        module = copy.deepcopy(initial).to(d)
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        x, y = (v.to(d) for v in batch(i))
        for _ in range(5):
            train_on(module, x, y, optimizer, lambda o: ltm.optimizer_step(o, barrier=True))
        return [p.detach().cpu() for p in module.parameters()]

    with config.override(ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB=bucket_megabytes):
        found = values(in_threads(train))
    whole = copy.deepcopy(initial)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
    xs, ys = zip(*[batch(i) for i in range(REPLICAS)])
    for _ in range(5):
        train_on(whole, torch.cat(xs), torch.cat(ys), optimizer, lambda o: o.step())
    for one in found:
        torch.testing.assert_close(one, [p.detach() for p in whole.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(one, found[0]))


def test_gradients_are_reduced_in_place_and_missing_ones_are_skipped():
    def reduce(i, d):
        used, unused = (nn.Parameter(torch.ones(2, device=d)) for _ in range(2))
        optimizer = torch.optim.SGD([{"params": [used]}, {"params": [unused]}], 1.0)
        (used * i).sum().backward()
        gradient = used.grad
        ltm.reduce_gradients(optimizer)
        return used.grad is gradient, gradient.cpu().tolist(), unused.grad is None

    assert values(in_threads(reduce)) == [(True, [1.5, 1.5], True)] * REPLICAS


def test_gradients_of_other_parameters_are_not_added():
    def reduce(i, d):
        weights = [nn.Parameter(torch.ones(2, device=d)) for _ in range(4)]
        (weights[3] if i == 2 else weights[0] + weights[1]).sum().backward()
        if i == 2:
            weights[2].grad = torch.ones(2, device=d)
        ltm.reduce_gradients(torch.optim.SGD(weights, 1.0))
        return weights[2 if i == 2 else 0].grad.tolist()

    with whole_tables():
        found = in_threads(reduce)
    for error in found:
        assert isinstance(error, PeerFailure)
        assert "all_reduce sum parameters 0-1 mean of f32[2], f32[2] at" in str(error)
        assert "all_reduce sum parameters 2-3 mean of f32[2], f32[2] at" in str(error)


@pytest.mark.parametrize("groups", [None, [[1, 0], [2, 3]]])
@pytest.mark.parametrize("rows", [[1, 1, 1, 1], [0, 3, 2, 1], [0, 0, 0, 0]])
def test_sparse_gradients_are_those_of_all_batches(rows, groups):
    table = draw(70, 6, 2)

    def gradient(embedding, looked_up):
        embedding(looked_up.to(embedding.weight.device)).square().sum().backward()
        return embedding.weight.grad

    def looked_up(i):
        return (torch.arange(rows[i]) * 2 + i) % 5

    def reduce(i, d):
        embedding = nn.Embedding.from_pretrained(table.to(d), freeze=False, sparse=True)
        bias = nn.Parameter(torch.zeros(1, device=d))
        (bias * i).sum().backward()
        kept = gradient(embedding, looked_up(i))
        ltm.reduce_gradients(torch.optim.SGD([embedding.weight, bias], 1.0), groups)
        return embedding.weight.grad is kept, kept.is_sparse, kept.to_dense().cpu()

    for i, (is_kept, is_sparse, found) in enumerate(values(in_threads(reduce))):
        members = next(group for group in groups or [range(REPLICAS)] if i in group)
        whole = nn.Embedding.from_pretrained(table.clone(), freeze=False, sparse=True)
        expected = gradient(whole, torch.cat([looked_up(member) for member in members]))
        assert is_kept and is_sparse
        torch.testing.assert_close(found, expected.to_dense() / len(members))


def test_an_optimizer_may_have_sparse_gradients_alone():
    def step(i, d):
        embedding = nn.Embedding.from_pretrained(torch.zeros(4, 1, device=d), False, sparse=True)
        embedding(torch.tensor([i, 0]).to(d)).sum().backward()
        ltm.optimizer_step(torch.optim.SparseAdam([embedding.weight], 1.0), reduce="sum")
        return embedding.weight.grad.to_dense().flatten().tolist(), embedding.weight[3].item()

    assert values(in_threads(step)) == [([5.0, 1.0, 1.0, 1.0], pytest.approx(-1.0))] * REPLICAS


def test_a_sum_of_gradients_is_left_whole():
    def reduce(i, d):
        weight = nn.Parameter(torch.zeros(1, device=d))
        optimizer = torch.optim.SGD([weight], 1.0)
        (weight * i).sum().backward()
        ltm.optimizer_step(optimizer, reduce="sum")
        return weight.item()

    assert values(in_threads(reduce)) == [-6.0] * REPLICAS


def _after_a_backward(device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Four layers that have gradients."""
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).to(device)
    module(torch.ones(2, 8, device=device)).sum().backward()
    return module, torch.optim.SGD(module.parameters(), 0.1)


def test_a_bucket_leaves_while_the_backward_still_runs():
    texts = []

    def train(i, d):
        module, optimizer = _after_a_backward(d)
        ltm.reduce_gradients(optimizer)
        if i == 0:
            texts.append(_schedule_of_pending(module))
        ltm.mark_step(d)

    with config.override(ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB=300 / (1 << 20)):
        values(in_threads(train))
    names = [line.split()[2] for line in texts[0].splitlines()]
    assert names.index("collective_start") < len(names) - 1 - names[::-1].index("matmul")
    assert names.count("collective_start") == 4


def _schedule_of_pending(module: nn.Module) -> str:
    return str(_pending_graph(module, [p.grad for p in module.parameters()]))


def _pending_graph(module: nn.Module, wanted: list[torch.Tensor]) -> Graph:
    """What computes `wanted`, and runs what is on the chain of collectives."""
    recorder = state_of(next(module.parameters())).device.recorder()
    outputs = (recorder.token, *[state_of(tensor).value for tensor in wanted])
    calls = live_calls(recorder.path(), outputs)
    return expand(calls, outputs, Numbering(calls))


def test_buckets_start_before_the_last_weight_gradient_in_the_native_program_too():
    orders = []

    def train(i, d):
        module, optimizer = _after_a_backward(d)
        ltm.optimizer_step(optimizer)
        if i == 0:
            graph = pipeline.run(_pending_graph(module, list(module.parameters())))
            inputs = frozenset(range(len(graph.inputs)))  # parameters are written over: kept late
            orders.append(planned_steps(prepared(graph), inputs))
        ltm.mark_step(d)

    with config.override(ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB=300 / (1 << 20)):
        values(in_threads(train))
    nodes = [step.unit.node for step in orders[0] if isinstance(step.unit, Product)]
    kinds = ["product" if node.op is ops.MATMUL else node.op.name for node in nodes]
    assert all(step.is_native for step in orders[0])
    starts = [k for k, kind in enumerate(kinds) if kind == "collective_start"]
    products = [k for k, kind in enumerate(kinds) if kind == "product"]
    waits = [k for k, kind in enumerate(kinds) if kind == "collective_wait"]
    assert len(starts) == len(waits) == 4
    # all but the first layer's bucket leave while products are still to come, and are not awaited
    assert sum(k < products[-1] for k in starts) >= 3, kinds
    assert starts[-1] < waits[0] or products[-1] < waits[0], kinds


@pytest.mark.parametrize("width", [16, 256])
def test_what_is_sent_stays_as_it_is_until_the_others_have_come(width):
    """Kernels that run meanwhile work in other memory: the first replica is far ahead."""

    alone = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)])
    copies = [copy.deepcopy(alone) for _ in range(REPLICAS)]

    def train(i, d):
        module = copies[i].to(d)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        module(torch.full((2, width), 1.0 + i, device=d)).square().mean().backward()
        ltm.optimizer_step(optimizer)
        optimizer.zero_grad()  # nobody keeps the gradients
        time.sleep(0.3 * i)
        ltm.mark_step(d, wait=True)
        return [p.cpu() for p in module.parameters()]

    losses = [alone(torch.full((2, width), 1.0 + i)).square().mean() for i in range(REPLICAS)]
    (sum(losses) / REPLICAS).backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()
    one_each = 1 / (1 << 20)
    with config.override(ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB=one_each):
        for found in values(in_threads(train)):
            torch.testing.assert_close(found, [p.detach() for p in alone.parameters()])


def test_a_small_exchange_does_not_wait_where_it_begins():
    begun = threading.Event()

    def both(ordinal, device):
        progress = ProgressRunner().current()
        operands = [torch.full((3,), float(ordinal + 1)), torch.tensor([[10.0 * ordinal]])]
        if ordinal:
            assert begun.wait(LIMIT_SECONDS), "replica 0 waits for replica 1 where it begins"
        small = progress.start(Collective("all_reduce", "sum"), operands)
        begun.set()
        large = progress.start(Collective("all_reduce", "sum"), [torch.ones(100_000)])
        found = [x.tolist() for x in progress.wait(small)], progress.wait(large)[0].sum().item()
        progress.finish()  # as a program ends: others of the replica wait for their turn
        return found

    for small, large in values(in_threads(both, 2)):
        assert small == [[3.0] * 3, [[10.0]]] and large == 200_000


# --- functions --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sum", "min", "max", "mul"])
def test_gradients_of_all_reduce_need_no_exchange(kind):
    inputs = [torch.tensor([1.0, 0.0, 3.0 + i]) for i in range(REPLICAS)]
    scale = 0.5 if kind == "sum" else 1.0

    def differentiate(i, d):
        x = inputs[i].to(d).requires_grad_()
        y = functions.all_reduce(kind, x, scale)
        (y * torch.arange(1.0, 4.0, device=d)).sum().backward()
        return x.grad.cpu()

    grad = torch.arange(1.0, 4.0)
    for i, found in enumerate(values(in_threads(differentiate))):
        x, output = inputs[i], REDUCTIONS[kind](torch.stack(inputs))
        expected = {
            "sum": grad * scale,
            "min": grad * (x == output),
            "max": grad * (x == output),
            "mul": torch.where(x == 0, torch.zeros(3), grad * output / x),
        }[kind]
        torch.testing.assert_close(found, expected)


def test_the_gradient_of_all_gather_is_the_own_slice():
    def differentiate(i, d):
        x = torch.ones(2, device=d, requires_grad=True)
        (functions.all_gather(x) * torch.arange(8.0, device=d)).sum().backward()
        return x.grad.cpu().tolist()

    assert values(in_threads(differentiate)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_gradient_of_a_gathered_number_is_a_number():
    def differentiate(i, d):
        x = torch.tensor(i + 1.0, device=d, requires_grad=True)
        gathered = functions.all_gather(x)
        (gathered * torch.arange(4.0, device=d)).sum().backward()
        return gathered.tolist(), x.grad.item(), x.grad.shape

    expected = [([1, 2, 3, 4], i, torch.Size([])) for i in range(REPLICAS)]
    assert values(in_threads(differentiate)) == expected


@pytest.mark.parametrize("split", [1, 3])
def test_distributed_mm_is_the_whole_weight_times_the_own_input(split):
    weight = draw(50, 5, 8)

    def multiply(i, d):
        shard = weight[:, 2 * i : 2 * i + 2].to(d)
        return functions.distributed_mm(shard, draw(i, 8, 3).to(d), split).cpu()

    for i, found in enumerate(values(in_threads(multiply))):
        torch.testing.assert_close(found, weight @ draw(i, 8, 3))


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (2, 3, 4, 4), (2, 3, 2, 2, 2)])
def test_sync_batch_norm_is_batch_norm_over_all_batches(shape):
    def normalise(i, d):
        layer = functions.SyncBatchNorm(3).double().to(d)
        x = draw(i, *shape).to(d).requires_grad_()
        y = layer(x)
        y.pow(3).sum().backward()
        ltm.reduce_gradients(torch.optim.SGD(layer.parameters(), 1.0), reduce="sum")
        return [
            v.detach().cpu()
            for v in (
                y,
                x.grad,
                layer.weight.grad,
                layer.bias.grad,
                layer.running_mean,
                layer.running_var,
            )
        ]

    x = torch.cat([draw(i, *shape) for i in range(REPLICAS)]).requires_grad_()
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    layer = kinds[len(shape)](3).double()
    y = layer(x)
    y.pow(3).sum().backward()
    count = x.numel() // 3
    biased = 0.9 + (layer.running_var - 0.9) * (count - 1) / count
    for i, found in enumerate(values(in_threads(normalise))):
        own = slice(i * shape[0], (i + 1) * shape[0])
        expected = [
            y[own],
            x.grad[own],
            layer.weight.grad,
            layer.bias.grad,
            layer.running_mean,
            biased,
        ]
        torch.testing.assert_close(found, [v.detach() for v in expected])


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("differ", ["shape", "kind", "dtype", "order"])
def test_a_mismatch_raises_the_same_table_everywhere(differ):
    def disagree(i, d):
        odd = i == 2
        x = torch.ones(4 if odd and differ == "shape" else 3, device=d)
        if odd and differ == "dtype":
            x = x.to(torch.int32)
        calls = [
            lambda: ltm.all_reduce("max" if odd and differ == "kind" else "sum", x),
            lambda: ltm.all_gather(x),
        ]
        for call in calls[::-1] if odd and differ == "order" else calls:
            result = call()
        return result.cpu()

    with whole_tables():
        found = in_threads(disagree)
    assert all(isinstance(one, PeerFailure) for one in found), found
    assert len({str(one) for one in found}) == 1
    text = str(found[0])
    assert text.count("test_collectives.py") == REPLICAS, text  # every replica's line
    assert "all_reduce sum of f32[3]" in text


def test_an_absent_replica_is_named_with_its_last_collective(monkeypatch):
    def stay_away(i, d):
        ltm.all_reduce("sum", torch.ones(2, device=d)).cpu()
        if i != 1:
            return ltm.all_gather(torch.ones(2, device=d)).cpu()
        wait_until_others_are_in("all_gather", session.current().programs)
        monkeypatch.setenv("LTC_PEER_TIMEOUT", "1.5")

    found = in_threads(stay_away)
    errors = [one for i, one in enumerate(found) if i != 1]
    assert all(isinstance(one, PeerFailure) for one in errors), found
    assert len({str(one) for one in errors}) == 1
    assert "Replica(s) 1 did not enter within 1.5 s" in str(errors[0])
    assert "all_reduce sum of f32[2]" in str(errors[0])


def test_a_replica_whose_step_fails_does_not_let_the_others_wait():
    def fail(i, d):
        index = torch.tensor([9 if i == 3 else 1], device=d)
        picked = torch.ones(4, device=d)[index]
        return ltm.all_reduce("sum", picked).cpu()

    found = in_threads(fail)
    assert isinstance(found[3], IndexError), found
    assert all(isinstance(one, PeerFailure) for one in found[:3]), found
    assert "Replica 3 of 4 has failed" in str(found[0]) and "IndexError" in str(found[0])


def test_threads_meet_again_after_a_failure():
    in_threads(lambda i, d: ltm.all_reduce("sum", torch.ones(2 + (i == 0), device=d)).cpu())
    found = values(in_threads(lambda i, d: ltm.all_reduce("sum", torch.ones(2, device=d)).cpu()))
    assert [one.tolist() for one in found] == [[4, 4]] * REPLICAS


def test_the_interpreter_is_free_while_a_collective_waits():
    ready = threading.Event()

    def wait(i, d):
        if i == 0:
            ready.wait()  # replica 0 comes only after this thread could run Python meanwhile
        return ltm.all_reduce("sum", torch.ones(100_000, device=d)).cpu()[0].item()

    timer = threading.Timer(0.3, ready.set)
    timer.start()
    assert values(in_threads(wait)) == [4.0] * REPLICAS
    timer.join()


def test_host_level_sums_are_in_place():
    def reduce(i, d):
        x = torch.full((70_000,), float(i))
        collectives.host_all_reduce(x)
        return x

    assert all((one == 6).all() for one in values(in_threads(reduce)))


def test_a_program_with_collectives_gives_nothing_where_it_fails():
    def step(ordinal: int, device: str) -> list[str]:
        good = torch.ones(2).to(device) + 1
        row = torch.tensor([7 if ordinal == 1 else 0]).to(device)
        taken = torch.ones(3).to(device)[row]
        total = ltm.all_reduce("sum", torch.ones(2).to(device))
        errors = []
        for call in (lambda: ltm.mark_step(wait=True), good.cpu, taken.cpu, total.cpu):
            try:
                call()
            except (IndexError, PeerFailure) as error:
                errors.append(type(error).__name__)
        return errors

    other, failing = in_threads(step, 2)
    assert other == ["PeerFailure"] * 4
    assert failing == ["OutOfRangeIndexError"] * 4
