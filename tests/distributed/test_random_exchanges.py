"""Random exchanges among replicas of random delays: everyone has the right bits, every time.

A run of little memory makes each sum of many pieces, which wait for one another's memory.
"""

import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch

from ltc.distributed import collectives, world
from ltc.distributed.transport import shm_segment
from ltc.ir.collective import Collective

sys.path.insert(0, str(Path(__file__).parent))
from replicas import in_processes, in_threads, values

pytestmark = pytest.mark.devices(4)

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.uint8]
REDUCTIONS = {
    "sum": torch.add, "mul": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "and": torch.bitwise_and, "or": torch.bitwise_or,
}  # fmt: skip
KINDS = ["all_reduce", "all_reduce", "all_reduce", "all_gather", "reduce_scatter", "broadcast"]
SIZES = [0, 1, 3, 64, 1000, 4097, 30_011, 120_001, 400_000]
EXCHANGES = 40
LITTLE = 1 << 18  # bytes of each part of the memory
MOST_DELAY = 2e-3


def operand(seed: int, number: int, replica: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * seed + 10 * number + replica)
    if dtype.is_floating_point:
        return torch.randn(size, generator=draw).to(dtype)
    return torch.randint(0, 100, (size,), generator=draw).to(dtype)


def reduced(kind: str, operands: list[torch.Tensor]) -> torch.Tensor:
    """In their order; 16-bit floats in 32 bits, rounded once."""
    first, *others = operands
    narrow = first.dtype in (torch.bfloat16, torch.float16)
    total = first.float() if narrow else first
    for other in others:
        total = REDUCTIONS[kind](total, other)
    return total.to(first.dtype)


def groups_of(draw: random.Random, replicas: int) -> tuple[tuple[int, ...], ...]:
    if draw.random() < 0.6 or replicas != 4:
        return ()
    return draw.choice([((0, 1), (2, 3)), ((0, 2), (1, 3)), ((3, 0), (2, 1))])


class Program:
    """What all replicas run: the same draws, but for the delays."""

    def __init__(self, seed: int, replicas: int, dtypes: list[torch.dtype]) -> None:
        self.seed, self.replicas, self.dtypes = seed, replicas, dtypes
        self.draw = random.Random(seed)

    def run(self, ordinal: int) -> int:
        """How many exchanges were right; AssertionError names one that was not."""
        delays = random.Random(f"{self.seed} {ordinal}")
        for number in range(EXCHANGES):
            time.sleep(delays.choice([0.0, 0.0, delays.random() * MOST_DELAY]))
            self.exchange(number, ordinal)
        return EXCHANGES

    def exchange(self, number: int, ordinal: int) -> None:
        draw = self.draw
        kind, dtype = draw.choice(KINDS), draw.choice(self.dtypes)
        reduction = draw.choice([*REDUCTIONS][: 4 if dtype.is_floating_point else 6])
        groups, size = groups_of(draw, self.replicas), draw.choice(SIZES)
        group = next((g for g in groups if ordinal in g), tuple(range(self.replicas)))
        root = draw.randrange(len(group))
        size = size // len(group) * len(group) if kind == "reduce_scatter" else size
        given = [operand(self.seed, number, member, size, dtype) for member in group]
        own, position = given[group.index(ordinal)], group.index(ordinal)
        what = f"{number}: {kind} {reduction} of {size} {dtype} among {groups} at {ordinal}"
        if kind == "all_reduce" and draw.random() < 0.5:
            collectives.host_all_reduce(own, reduction, groups or None)
            found = own
        else:
            named = reduction if "reduce" in kind else ""
            where = root if kind == "broadcast" else 0
            (found,) = collectives.host_run(Collective(kind, named, groups, root=where), [own])
            given[position] = operand(self.seed, number, ordinal, size, dtype)
        if kind == "all_reduce" and found is own:
            given[position] = operand(self.seed, number, ordinal, size, dtype)
        expected = {
            "all_reduce": lambda: reduced(reduction, given),
            "all_gather": lambda: torch.cat(given),
            "broadcast": lambda: given[root],
            "reduce_scatter": lambda: (
                reduced(reduction, given).chunk(len(group))[position] if size else given[position]
            ),
        }[kind]()
        assert found.dtype == dtype and torch.equal(found, expected), what


def in_process(ordinal: int) -> int:
    shm_segment.MOST_PART_BYTES = int(os.environ["PART_BYTES"])
    dtypes = INTEGERS if os.environ.get("LTC_TRANSPORT") == "hosts" else FLOATS + INTEGERS
    replicas = int(os.environ["XRT_SHARD_WORLD_SIZE"])
    return Program(int(os.environ["SEED"]), replicas, dtypes).run(ordinal)


@pytest.mark.parametrize("part_bytes", [LITTLE, shm_segment.MOST_PART_BYTES])
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_processes_of_a_host(processes, part_bytes):
    environment = {"SEED": str(processes), "PART_BYTES": str(part_bytes)}
    found = values(in_processes(__file__, "in_process", processes, **environment))
    assert found == [EXCHANGES] * processes


@pytest.mark.parametrize("processes", [2, 3])
def test_hosts(processes):
    """Whole numbers, since hosts add in another order."""
    environment = {"SEED": "9", "PART_BYTES": str(LITTLE), "LTC_TRANSPORT": "hosts"}
    found = values(in_processes(__file__, "in_process", processes, **environment))
    assert found == [EXCHANGES] * processes


def test_threads():
    def run(ordinal: int, device: str) -> int:
        assert world.ordinal() == ordinal
        return Program(5, 4, FLOATS + INTEGERS).run(ordinal)

    assert values(in_threads(run, 4)) == [EXCHANGES] * 4
