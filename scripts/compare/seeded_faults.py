"""Faults put into the code generator one by one: does LTC_CHECK=1 find each of them?

    python scripts/compare/seeded_faults.py [--fault NAME ...] [--networks N | --steps N]

Each fault makes a kernel read unwritten memory, leave some of its result unwritten, or
write beside a value; or it makes two values share their memory. Each runs in a process of its own,
with programs that are right without it. With --networks the programs are networks at random
(tests/random_networks.py), and it is told after how many of them a fault shows: with LTC_CHECK=1,
and without it, by wrong results alone. With --steps the faults are those of what `ltc.compile` takes for
the same call, and the programs step functions at random (tests/networks/aliased_steps.py), at most N.
Exits with an error where a fault is missed, or where something is found without one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import ltc  # noqa: F401  makes the device known
from ltc import config
from ltc.backends.llvm.liveness import Lifetimes
from ltc.device.torch_device import storage_of
from ltc.errors import MemoryFault
from ltc.ir import ops
from ltc.llvm.conv import nhwc_input_tile
from ltc.llvm.emit import builder, memory_ops
from ltc.llvm.gemm import product_loops
from ltc.llvm.loops import context, values
from ltc.llvm.loops import rows as loop_rows
from ltc.llvm.ops import dispatch, primitives  # fmt: skip
from ltc.passes import memory_planner
from ltc.passes.memory_planner import ALIGNMENT
from ltc.replay import aliases, contents, replay_plan
from ltc.replay.guard import Changed

sys.path.insert(0, str(Path(__file__).parents[2]))  # of the tests, for their networks

FAULTS: dict[str, Callable[[], None]] = {}
OF_REPLAYS: dict[str, Callable[[], None]] = {}
WITHOUT = "no fault"
PIPE_BYTES = 4096  # written at once
END_OF_NUMBER = "\0"


def fault(seed: Callable[[], None]) -> Callable[[], None]:
    """Puts it on the list; its docstring says what is wrong with the code that it leaves."""
    FAULTS[seed.__name__.replace("_", " ")] = seed
    return seed


def fault_of_replays(seed: Callable[[], None]) -> Callable[[], None]:
    OF_REPLAYS[seed.__name__.replace("_", " ")] = seed
    return seed


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """`make` is given what is there; that nothing is there means that this list is out of date."""
    setattr(owner, name, make(getattr(owner, name)))


# --- what is read and was never written ----------------------------------------------------------


@fault
def sums_are_never_begun():
    """Rows are added to what their sum's memory holds already."""
    replace(loop_rows, "begin_sums", lambda right: lambda ctx, stores: None)


@fault
def the_rest_of_a_row_is_not_stored():
    """Lanes behind the last whole vector stay as they are."""

    def whole_vectors(store):
        return lambda b, stored, address, form, mask=None: (
            store(b, stored, address, form) if mask is None else None
        )

    replace(memory_ops, "store", whole_vectors)


@fault
def the_last_unit_of_work_is_missing():
    """Leave a row, strip or group of rows of each kernel to no task."""

    def all_but_one(share):
        return lambda self, units: share(self, units - 1)

    replace(builder.Builder, "share", all_but_one)


@fault
def the_last_rows_of_a_product_are_missing():
    """Leave out the rows that fill no whole block."""

    def whole_blocks(each_height):
        def rows(self, number, start, depth, spot):
            height = self.plan.height
            if height == 1:
                each_height(self, number, start, depth, spot)
                return
            is_whole = self._holds("slt", number, self.full)
            self.b.when(is_whole, [], lambda: self._rows(number, 0, height, start, depth, spot))

        return rows

    replace(product_loops.ProductLoops, "_each_height", whole_blocks)


@fault
def the_border_of_a_convolution_is_not_cleared():
    """Leave the padding of the copied lines, on the stack, unwritten."""
    replace(
        nhwc_input_tile.InputTile, "_clear", lambda right: lambda self, target, first, end: None
    )


@fault
def a_scatter_does_not_begin_with_its_base():
    """Leave out the copy of elements that no index names."""
    for op in (ops.PUT, ops.SCATTER):
        row = primitives.PRIMITIVES[op]
        primitives.PRIMITIVES[op] = dataclasses.replace(
            row, codes=lambda product, codes=row.codes: codes(product)[1:]
        )


@fault
def a_row_that_is_kept_is_not_stored():
    """The second pass over a row reads exponentials that the first has left in registers."""

    def not_stored(kept):
        def made(ctx, value, row, width):
            if value in ctx.kept.stored:
                return kept(ctx, value, row, width)
            ctx.kept.begun.add(value)
            return values.make(ctx, value, width)

        return made

    replace(values, "kept", not_stored)


# --- what is written beside a value, or over another ---------------------------------------------


@fault
def the_mask_of_a_rest_is_one_lane_too_wide():
    """The last vector of a row stores an element behind it."""
    replace(
        context.LoopContext, "first_lanes",
        lambda first: lambda self, count: first(self, count + 1),
    )  # fmt: skip


@fault
def scratch_memory_is_a_cache_line_short():
    """Make the memory that kernels of one product share shorter than its content."""
    replace(
        dispatch, "ScratchBuffer",
        lambda buffer: lambda owner, name, nbytes: buffer(owner, name, max(8, nbytes - ALIGNMENT)),
    )  # fmt: skip


@fault
def places_in_the_block_are_too_short():
    """The plan gives a value less than it needs: the next one begins before its end."""
    lines = 3 * ALIGNMENT  # with guards between values fewer would do no harm
    replace(
        memory_planner._Region,
        "size_of",
        lambda size: lambda self, value: size(self, value) - lines,
    )

    def and_room_behind(plan):
        def longer(*args):
            places, nbytes = plan(*args)
            return places, nbytes + 2 * lines

        return longer

    replace(memory_planner, "plan", and_room_behind)


@fault
def lives_end_one_step_early():
    """The last reader of a value finds that another one has its place."""

    def shorter(all_of):
        return lambda self: [
            dataclasses.replace(life, last=max(life.first, life.last - 1)) for life in all_of(self)
        ]

    replace(Lifetimes, "all", shorter)


# --- which calls are the same --------------------------------------------------------------------


def replace_places(make: Callable[[Any], Any]) -> None:
    replace(aliases, "places_of", make)
    replay_plan.places_of = aliases.places_of


@fault_of_replays
def a_base_stands_for_its_views():
    """Views are not looked at: their offset, or whether they are any."""

    def of_bases(places_of):
        def places(tensors, bases):
            numbers, found = places_of(tensors, bases)
            return numbers, [one[0] if isinstance(one, tuple) else one for one in found]

        return places

    replace_places(of_bases)


@fault_of_replays
def offsets_of_views_are_not_compared():
    """Ignore how a view is derived from its base."""

    def without_chains(places_of):
        def places(tensors, bases):
            numbers, found = places_of(tensors, bases)
            return numbers, [(one[0], ()) if isinstance(one, tuple) else one for one in found]

        return places

    replace_places(without_chains)


@fault_of_replays
def two_arguments_may_be_one_memory():
    """Ignore that bases are different ones."""

    def of_any_tensors(right):
        def bases_of(self, tensors, moving):
            found = dict(enumerate(self._known))
            for place, tensor in zip(self._places, moving, strict=True):
                state = storage_of(tensor).lazy
                number, chain = place if isinstance(place, tuple) else (place, None)
                is_alike = chain == (None if state.base is None else state.chain)
                if not is_alike or found.setdefault(number, state.base or state) is not (
                    state.base or state
                ):
                    raise Changed
            return list(found.values())

        return bases_of

    replace(replay_plan.ReplayPlan, "_bases_of", of_any_tensors)


@fault_of_replays
def names_of_attributes_are_those_of_globals():
    """Every name in the code counts as one of a global."""
    replace(contents, "globals_in", lambda right: lambda code: frozenset(contents.names_in(code)))


# --- programs ------------------------------------------------------------------------------------


def rows(given) -> torch.Tensor:
    """Norms and softmax along rows, whose results are added up over the others."""
    x, weight, bias = given(16, 64, 33), given(33), given(33)  # enough rows to be summed in pieces
    x = F.layer_norm(x * 2, (33,), weight, bias)
    return (x + 1).softmax(-1).transpose(1, 2).square().sum()


def layers(given) -> torch.Tensor:
    """Products whose extents fill no blocks, one after the other, with gelu in between."""
    x, wide, narrow = given(13, 37), given(37, 150), given(150, 37)
    for _ in range(2):
        x = torch.tanh(F.gelu(x @ wide) @ narrow) * 2 + x
    return x.log_softmax(1).square().mean()


def images(given) -> torch.Tensor:
    """Convolutions with padding, deep and wide, pooling, a product at the end."""
    x, first, deep = given(2, 3, 14, 14), given(32, 3, 3, 3), given(32, 1, 3, 3)
    last = given(32, 5)  # as many channels as fill vectors of any processor
    x = F.relu(F.conv2d(x, first, padding=1))
    x = F.conv2d(x, deep, padding=1, groups=32)
    x = F.max_pool2d(x, 2).mean((2, 3))
    return (x @ last).square().sum()


def tables(given) -> torch.Tensor:
    """Rows taken from a table, added to another one, and put in some places."""
    table, new = given(19, 21), given(5, 21)
    index = given.index(5, 19)
    taken = table[index] * new
    added = torch.zeros_like(table).index_add(0, index, taken)
    return (added.cumsum(1) + table.scatter(0, index[:, None].expand(5, 21), new)).tanh().sum()


PROGRAMS = (rows, layers, images, tables)


class Given:
    """Random operands of a program, on the lazy device: the same in every run."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self.leaves: list[torch.Tensor] = []

    def __call__(self, *shape: int) -> torch.Tensor:
        value = torch.randn(shape, generator=self._random) / 2
        self.leaves.append(value.to("ltc").requires_grad_())
        return self.leaves[-1]

    def index(self, count: int, size: int) -> torch.Tensor:
        return torch.randint(0, size, (count,), generator=self._random).to("ltc")


def run(program: Callable[[Given], torch.Tensor]) -> None:
    """The program and its gradients."""
    given = Given()
    program(given).backward()
    for leaf in given.leaves:
        leaf.grad.cpu()


# --- looking -------------------------------------------------------------------------------------


def found_in_programs(begins: Callable[[int], None]) -> str | None:
    """Return the finding of LTC_CHECK in the first program that has one."""
    for program in PROGRAMS:
        try:
            run(program)
        except MemoryFault as error:
            return f"{program.__name__}: {error} {' '.join(error.__notes__)}"
    return None


def found_in_networks(seeds: range, begins: Callable[[int], None]) -> str | None:
    """The first of these networks that is wrong, by its number, and what is wrong with it."""
    networks = importlib.import_module("tests.random_networks")
    for seed in seeds:
        begins(seed)
        failure = networks.failure_of(seed)
        if failure is not None:
            return f"{seed} {failure}"
    return None


def found_in_steps(seeds: range, begins: Callable[[int], None]) -> str | None:
    """The first of these step functions that is wrong, by its number, and what is wrong with it."""
    steps = importlib.import_module("tests.networks.aliased_steps")
    for seed in seeds:
        begins(seed)
        failure, _ = steps.judged(seed, "native")
        if failure:
            return f"{seed} {failure}"
    return None


Look = Callable[[range, Callable[[int], None]], str | None]


def found_by_random(look: Look, seed: Callable[[], None], count: int) -> str | None:
    """After how many programs the fault shows: one that is wrong without it, too, shows nothing."""
    first = 0
    while first < count:
        found = what_programs_show(look, range(first, count), seed)
        if found is None:
            return None
        number, _, failure = found.partition(" ")
        first = int(number) + 1
        if what_programs_show(look, range(int(number), first), no_fault) is None:
            return f"after {first} programs: {failure}"
    return None


def what_programs_show(look: Look, seeds: range, seed: Callable[[], None]) -> str | None:
    """Return the finding of `look` in the code with a fault; one that ends its process has failed
    too.
    """
    try:
        return in_a_process_of_its_own(functools.partial(look, seeds), seed)
    except ProcessEnded as ended:
        if ended.began is None:
            raise
        return f"{ended.began} it ended its process with status {ended.status}"


def no_fault() -> None:
    """The code as it is."""


class ProcessEnded(RuntimeError):
    """A child has found nothing and ended with that status, after it began with that number."""

    def __init__(self, status: int, began: int | None) -> None:
        super().__init__(f"the process ended with status {status}, and found nothing")
        self.status, self.began = status, began


def in_a_process_of_its_own(
    look: Callable[[Callable[[int], None]], str | None], seed: Callable[[], None]
) -> str | None:
    """Return the finding of `look` in code that `seed` has changed, in a child that ends with it.

    Raises ProcessEnded where the child ends in any other way.

    Args:
        look: Gets a function to call with each number that it begins with.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            seed()
            found = look(lambda number: begins(writer, number))
            os.write(writer, (found or "").encode()[:PIPE_BYTES])
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        *began, found = pipe.read().split(END_OF_NUMBER)
    _, status = os.waitpid(child, 0)
    if status:
        raise ProcessEnded(status, int(began[-1]) if began else None)
    return found or None


def begins(writer: int, number: int) -> None:
    os.write(writer, f"{number}{END_OF_NUMBER}".encode())


def report(names: list[str], look: Callable[[Callable], str | None]) -> Iterator[bool]:
    """Give True for each fault that is found as it should be; print a line for each."""
    for name in names:
        try:
            found = look({**FAULTS, **OF_REPLAYS}.get(name, no_fault))
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            yield False
            continue
        print(f"{name}: {found or 'nothing is found'}", flush=True)
        yield (found is None) == (name == WITHOUT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fault",
        action="append",
        choices=[WITHOUT, *FAULTS, *OF_REPLAYS],
        help="a fault to put in; may be repeated; default: all",
    )
    parser.add_argument("--networks", type=int, metavar="N", help="networks at random, at most N")
    parser.add_argument("--steps", type=int, metavar="N", help="step functions, at most N")
    options = parser.parse_args()
    names = options.fault or [WITHOUT, *(FAULTS if options.steps is None else OF_REPLAYS)]
    good: list[bool] = []
    with config.override(LTC_BACKEND="llvm", LTC_CACHE=0, LTC_CHECK=1, LTC_TIER="native"):
        if options.steps is not None:
            by_steps = functools.partial(found_by_random, found_in_steps, count=options.steps)
            good += report(names, by_steps)
        elif options.networks is None:
            good += report(names, lambda seed: in_a_process_of_its_own(found_in_programs, seed))
        else:
            for checked in (True, False):
                print(f"# LTC_CHECK={int(checked)}")
                with config.override(LTC_CHECK=checked):
                    by_networks = functools.partial(
                        found_by_random, found_in_networks, count=options.networks
                    )
                    good += report(names, by_networks)
    print(f"{sum(good)} of {len(good)} as they should be")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
