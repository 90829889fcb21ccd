"""DistributedDataParallel where parameters take no part: same gradients as on the CPU with gloo."""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ltc
from ltc import config
from ltc.debug import metrics
from ltc.training_loop import steps
from tests.distributed.ranks import test_on_all_ranks  # noqa: F401
from tests.distributed.training import DEVICE, momentum

STEPS = 10
TIERS = ("native", "auto")
FIND = {"find_unused_parameters": True}
STATIC = {"static_graph": True}


class Branches(nn.Module):
    """A trunk, and heads of which `chosen` take part."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 2) for _ in range(heads)])

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        hidden = torch.relu(self.trunk(x))
        return sum(self.heads[i](hidden) for i in chosen)


def batch(step: int, rank: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 4, generator=generator, dtype=torch.float64).to(device)


def trained(device: str, make: Callable, backward: Callable, how: dict, keeps: bool = False):
    """After each step every gradient (None where there is none), and at the end every weight.

    backward  of (model, step, device): all that comes before the optimizer's step
    keeps     whether gradients of the last step stay
    """
    model = DistributedDataParallel(make().double().to(device), **how)
    optimizer = momentum(model.parameters())
    gradients = []
    for step in range(STEPS):
        if not keeps:
            optimizer.zero_grad()
        backward(model, step, device)
        gradients += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        steps.mark()
    found = [*gradients, *(p.detach() for p in model.parameters())]
    return [None if x is None else x.cpu() for x in found]


def assert_like_the_cpu(make: Callable, backward: Callable, how: dict, **more) -> list:
    """The same gradients and weights on both devices, in both tiers; what the CPU has."""
    expected = trained("cpu", make, backward, how, **more)
    for tier in TIERS:
        with config.override(LTC_TIER=tier):
            found = trained(DEVICE, make, backward, how, **more)
        assert [x is None for x in found] == [x is None for x in expected], tier
        for ours, theirs in zip(found, expected, strict=True):
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    weights = [x for x in expected if x is not None]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [x.tolist() for x in weights])
    assert gathered[0] == gathered[-1], "replicas differ"
    return expected


def squares(*chosen_of_ranks: tuple[int, ...]) -> Callable:
    """Backward of the mean square of the heads that each rank has chosen."""

    def backward(model: nn.Module, step: int, device: str) -> None:
        rank = dist.get_rank()
        chosen = chosen_of_ranks[rank % len(chosen_of_ranks)]
        model(batch(step, rank, device), chosen).square().mean().backward()

    return backward


def check_a_head_that_one_rank_alone_uses(rank, world):
    expected = assert_like_the_cpu(Branches, squares((0, 1), (0,)), FIND)
    unused = [x is None for x in expected[:8]]
    assert unused == [False] * 6 + [True] * 2, "the third head has no gradient anywhere"


def check_ranks_that_use_different_heads(rank, world):
    assert_like_the_cpu(Branches, squares((0,), (1,)), FIND)


def check_parameters_that_no_rank_uses(rank, world):
    assert_like_the_cpu(Branches, squares((0,)), FIND)


def check_parameters_that_all_ranks_use(rank, world):
    assert_like_the_cpu(Branches, squares((0, 1, 2)), FIND)


def check_several_buckets(rank, world):
    assert_like_the_cpu(Branches, squares((0, 1), (2,)), {**FIND, "bucket_cap_mb": 1e-5})


def by_rank_and_step(model: nn.Module, step: int, device: str) -> None:
    rank = dist.get_rank()
    chosen = ((step + rank) % 3, (step * rank) % 2)
    model(batch(step, rank, device), chosen).square().mean().backward()


def check_branches_that_depend_on_the_rank_and_the_step(rank, world):
    assert_like_the_cpu(Branches, by_rank_and_step, FIND)


def check_gradients_that_stay_as_they_were_where_no_rank_uses_them(rank, world):
    assert_like_the_cpu(Branches, by_rank_and_step, FIND, keeps=True)


def check_gradients_that_are_views_of_buckets(rank, world):
    views = {**FIND, "gradient_as_bucket_view": True}
    assert_like_the_cpu(Branches, squares((0, 1), (0,)), views)
    assert_like_the_cpu(Branches, by_rank_and_step, views, keeps=True)


def check_a_branch_that_depends_on_a_value(rank, world):
    def backward(model, step, device):
        x = batch(step, rank, device)
        chosen = (0,) if x.sum() > 0 else (1, 2)
        model(x, chosen).square().mean().backward()

    assert_like_the_cpu(Branches, backward, FIND)


@dataclass
class Outputs:
    first: torch.Tensor
    rest: dict


class Nested(Branches):
    def forward(self, x: torch.Tensor, kind: type) -> object:
        hidden = self.trunk(x)
        first, second, third = (head(hidden) for head in self.heads)
        rest = {"second": (second, [third]), "size": len(x), "none": None}
        made = {dict: {"first": first, **rest}, tuple: (first, rest), Outputs: Outputs(first, rest)}
        return made[kind]


def check_outputs_in_containers_of_which_part_is_used(rank, world):
    def backward(model, step, device):
        x = batch(step, rank, device)
        if step % 3 == 0:
            loss = model(x, dict)["first"].sum()
        elif step % 3 == 1:
            first, rest = model(x, tuple)
            loss = (first + rest["second"][1][0]).square().sum()
        else:
            loss = model(x, dict)["second"][rank % 2 - 1 if rank else 0].sum()
        loss.backward()

    def of_a_dataclass(model, step, device):
        out = model(batch(step, rank, device), Outputs)
        (out.first.sum() + out.rest["second"][0].sum() + out.rest["second"][1][0].sum()).backward()

    def second(model, step, device):
        found = model(batch(step, rank, device), dict)["second"]
        (found[0] if rank == 0 else found[1][0]).square().sum().backward()

    assert_like_the_cpu(Nested, of_a_dataclass, FIND)
    assert_like_the_cpu(Nested, second, FIND)


def check_a_step_without_exchange_counts_what_it_used(rank, world):
    def backward(model, step, device):
        with model.no_sync():
            model(batch(step, rank, device), (rank % 2,)).square().mean().backward()
        model(batch(step + 50, rank, device), (0,)).square().mean().backward()

    assert_like_the_cpu(Branches, backward, FIND)


def check_accumulation_over_several_exchanges(rank, world):
    def backward(model, step, device):
        for part in range(3):
            x = batch(3 * step + part, rank, device)
            model(x, ((rank + part) % 3,)).square().mean().backward()

    assert_like_the_cpu(Branches, backward, FIND)


def check_several_forwards_before_one_backward(rank, world):
    class TwoInputs(Branches):
        def forward(self, x, y, chosen):
            return super().forward(x, chosen) + super().forward(y, (0,))

    def backward(model, step, device):
        x, y = batch(step, rank, device), batch(step + 50, rank, device)
        model(x, y, (rank % 2,)).square().mean().backward()

    assert_like_the_cpu(TwoInputs, backward, FIND)

    def twice(model, step, device):
        x, y = batch(step, rank, device), batch(step + 50, rank, device)
        (model(x, (0,)).square().mean() + model(y, (0,)).mean()).backward()

    assert_like_the_cpu(Branches, twice, STATIC)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.third.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        for i in chosen:
            x = (self.first, self.second, self.third)[i](torch.tanh(x))
        return x


def check_shared_and_frozen_parameters(rank, world):
    assert_like_the_cpu(Tied, squares((0, 1, 0), (1,)), FIND)
    assert_like_the_cpu(Tied, squares((2,), (0, 2)), FIND)
    assert_like_the_cpu(Tied, squares((0, 1, 0)), STATIC)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        hidden = self.norm(self.trunk(x))
        return self.head(hidden) if 0 in chosen else hidden


def check_buffers_that_are_broadcast(rank, world):
    for broadcast in (True, False):
        how = {**FIND, "broadcast_buffers": broadcast}
        assert_like_the_cpu(Normalized, squares((0,), (1,)), how)


class Checkpointed(Branches):
    reentrant = True

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        hidden = checkpoint(self.trunk, x, use_reentrant=self.reentrant)
        again = checkpoint(self.trunk, x * 2, use_reentrant=self.reentrant)
        return sum(self.heads[i](hidden + again) for i in chosen)


class CheckpointedAnew(Checkpointed):
    reentrant = False


def check_checkpointed_layers_of_a_static_graph(rank, world):
    def backward(model, step, device):
        x = batch(step, rank, device).requires_grad_()
        model(x, (0, 1)).square().mean().backward()

    for make in (Checkpointed, CheckpointedAnew):
        assert_like_the_cpu(make, backward, STATIC)
    assert_like_the_cpu(CheckpointedAnew, squares((0,), (1,)), FIND)


def check_a_static_graph(rank, world):
    for how in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-5}, FIND):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of both options together
            assert_like_the_cpu(Branches, squares((0, 1)), {**STATIC, **how})
    assert_like_the_cpu(Branches, squares((0, 1, 2)), STATIC, keeps=True)


def check_ranks_whose_static_graphs_differ(rank, world):
    assert_like_the_cpu(Branches, squares((0, 1), (0,)), STATIC)


def check_a_graph_that_is_said_to_be_static_afterwards(rank, world):
    class Wrapped(DistributedDataParallel):
        def __init__(self, module, **how):
            super().__init__(module, **how)
            self._set_static_graph()

    found = []
    for device in ("cpu", DEVICE):
        model = Wrapped(Branches().double().to(device))
        for step in range(4):
            model.zero_grad()
            squares((0, 1))(model, step, device)
            steps.mark()
        found.append([None if p.grad is None else p.grad.cpu() for p in model.parameters()])
        assert model._get_ddp_logging_data()["static_graph"]
    for theirs, ours in zip(*found, strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)


def check_a_static_graph_that_changes_is_torchs_error(rank, world):
    texts = []
    for device in ("cpu", DEVICE):
        model = DistributedDataParallel(Branches().double().to(device), **STATIC)
        with pytest.raises(RuntimeError, match="training graph has changed") as caught:
            for step in range(3):
                squares((0,) if step < 2 else (1,))(model, step, device)
        texts.append(str(caught.value).splitlines()[0])
        dist.barrier()
    assert texts[0] == texts[1]


def check_unused_parameters_without_the_option_are_torchs_error(rank, world):
    for device in ("cpu", DEVICE):
        model = DistributedDataParallel(Branches().double().to(device))
        with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
            for step in range(2):
                squares((0,))(model, step, device)
        dist.barrier()


def check_ranks_that_have_batches_of_other_numbers(rank, world):
    for how in (FIND, {}):
        found = []
        for device in ("cpu", DEVICE):
            model = DistributedDataParallel(Branches().double().to(device), **how)
            optimizer = momentum(model.parameters())
            chosen = (0, rank % 2) if how else (0, 1, 2)
            with model.join():
                for step in range(3 + 2 * rank):
                    optimizer.zero_grad()
                    model(batch(step, rank, device), chosen).square().mean().backward()
                    optimizer.step()
                    steps.mark()
            found.append([p.detach().cpu() for p in model.parameters()])
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def check_two_models_in_one_step(rank, world):
    found = []
    for device in ("cpu", DEVICE):
        first, second = (
            DistributedDataParallel(Branches().double().to(device), **FIND) for _ in range(2)
        )
        optimizers = [momentum(model.parameters()) for model in (first, second)]
        for step in range(STEPS):
            for model, optimizer, chosen in zip((first, second), optimizers, ((rank,), (0, rank))):
                optimizer.zero_grad()
                model(batch(step, rank, device), chosen).square().mean().backward()
                optimizer.step()
            steps.mark()
        found.append([p.detach().cpu() for m in (first, second) for p in m.parameters()])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def check_an_optimizer_in_shards(rank, world):
    found = []
    for device in ("cpu", DEVICE):
        model = DistributedDataParallel(Branches().double().to(device), **FIND)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
        for step in range(STEPS):
            optimizer.zero_grad()
            squares((0, 1), (0,))(model, step, device)
            optimizer.step()
            steps.mark()
        found.append([p.detach().cpu() for p in model.parameters()])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def check_steps_under_ltc_compile(rank, world):
    found = []
    for device in ("cpu", DEVICE):
        model = DistributedDataParallel(Branches().double().to(device), **FIND)
        optimizer = momentum(model.parameters())

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x, (0, rank % 2)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = step if device == "cpu" else ltc.compile(step)
        losses = [float(run(batch(k, rank, device)).detach()) for k in range(12)]
        found.append([*map(torch.tensor, losses), *(p.detach().cpu() for p in model.parameters())])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


HOOKS = {
    "bfloat16": (default_hooks.bf16_compress_hook, 2**-7),  # 8 bits of mantissa
    "float16": (default_hooks.fp16_compress_hook, 2**-10),  # 11 bits
    "plain": (default_hooks.allreduce_hook, 1e-6),
    "bfloat16 around": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), 2**-7),
    "float16 around": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 2**-10),
}


def nameless(hook: Callable) -> Callable:
    """The hook under a name that torch accepts on the CPU, where gloo adds bfloat16 as well."""

    def renamed(state, bucket):
        return hook(state, bucket)

    return renamed


def check_hooks_that_compress(rank, world):
    for (name, (hook, tolerance)), how in itertools.product(HOOKS.items(), ({}, FIND, STATIC)):
        if name.endswith("around") and not how:
            continue  # three options of each hook are enough to see both
        found = []
        for device in ("cpu", DEVICE):
            model = DistributedDataParallel(Branches().double().to(device), **how)
            model.register_comm_hook(None, hook if device == DEVICE else nameless(hook))
            for step in range(4):
                model.zero_grad()
                chosen = ((0, 1), (0, 2)) if how is FIND else ((0, 1, 2),)
                squares(*chosen)(model, step, device)
                steps.mark()
            found.append([p.grad.cpu() for p in model.parameters()])
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2 * tolerance, atol=tolerance)


def check_a_steady_step_compiles_nothing(rank, world):
    for how, chosen in ((FIND, (0,)), (FIND, (0, 1, 2)), (STATIC, (0, 1))):
        model = DistributedDataParallel(Branches().double().to(DEVICE), **how)
        optimizer = momentum(model.parameters())

        def run(count, model=model, optimizer=optimizer, chosen=chosen):
            for step in range(count):
                optimizer.zero_grad()
                squares(chosen)(model, step, DEVICE)
                optimizer.step()
                steps.mark()

        run(4)
        steps.mark(wait=True)
        with metrics.counted() as grown:
            run(6)
            steps.mark(wait=True)
        assert grown["UncachedCompile"] == grown["RecordedEntries"] == 0, (how, chosen)
        reads = 1 if how is FIND and len(chosen) < 3 else 0
        assert grown["EarlySyncLiveTensorsCount"] == 6 * reads, (how, chosen)
