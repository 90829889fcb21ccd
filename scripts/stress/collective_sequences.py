"""Random sequences of groups and collectives, half of them with a fault in one rank: found, or right.

    python scripts/stress/collective_sequences.py --count 300             seeds 0 to 299
    python scripts/stress/collective_sequences.py --first 120 --count 1   one of them again
    python scripts/stress/collective_sequences.py --put-back scale        how soon an old fault is found

Two to four ranks, as processes of one host, as hosts of one process each, or as threads, run the same
drawn steps: exchanges of ltm and of process groups of every kind, sizes, dtypes, roots, works that are
waited for later; groups are made and destroyed, and the world begins anew.  The values are compared with
what plain arithmetic gives.  A fault changes one step of one rank: another root, dtype, length, scale or
operation; a call left out or exchanged with the next; a death; an exception.

Without a fault every value is right.  With one, every rank ends with a PeerFailure that shows a line or a
rank, or with its own death or exception, within LTC_PEER_TIMEOUT and what a busy machine needs; or, where
the fault makes no difference, all values are right.  Nothing hangs, and no value is wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("LTC_NUM_DEVICES", "4")
os.environ.setdefault("LTC_PEER_TIMEOUT", "5")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where ltc is not installed

import torch
import torch.distributed as dist

import ltc.core.lazy_model as ltm
from ltc.distributed import collectives, recorded_sums, world
from ltc.distributed.c10d import group_calls
from ltc.distributed.transport import call_log, communicator, session

FLOATS = ("float32", "float64", "bfloat16")
DTYPES = (*FLOATS, "int32", "int64")
SIZES = (1, 4, 12, 1200, 60_000)  # multiples of 12 beyond the first two are cut into equal parts
LTM = (
    "all_reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
    "broadcast",
    "meet",
)
DIST = (
    "sum", "average", "broadcast", "reduce", "gathered", "gather", "scatter", "scattered",
    "exchanged", "barrier", "message", "objects", "cpu_sum", "cpu_work",
)  # fmt: skip
FAULTS = (
    "root", "dtype", "length", "scale", "operation", "missing", "order", "death", "exception",
)  # fmt: skip
_HAS_ROOT = ("broadcast", "reduce", "gather", "scatter")
_HAS_SCALE = ("all_reduce", "reduce_scatter")
_HAS_NO_TENSOR = ("barrier", "objects", "meet", "new_group", "new_world", "end_group")


@dataclass(frozen=True)
class Step:
    """One step of a sequence.

    Attributes:
        group: The number of a process group in the sequence; -1: the world's, or ltm's.
    """

    number: int
    call: str
    group: int = -1
    elements: int = 4
    dtype: str = "float32"
    root: int = 0
    scale: float = 1.0
    operation: str = "sum"
    members: tuple[int, ...] = ()


@dataclass
class Sequence:
    """The steps that all ranks run, and the fault of one of them."""

    seed: int
    ranks: int
    transport: str
    steps: list[Step] = field(default_factory=list)
    fault: str = ""
    rank: int = -1  # that has the fault
    place: int = -1  # of the step in `steps`

    def of(self, rank: int) -> list[Step]:
        """The steps of a rank."""
        steps = list(self.steps)
        if rank == self.rank:
            step = steps[self.place]
            match self.fault:
                case "missing":
                    del steps[self.place]
                case "order":
                    steps[self.place : self.place + 2] = steps[self.place : self.place + 2][::-1]
                case "death" | "exception":
                    steps[self.place] = replace(step, call=self.fault)
                case _:
                    steps[self.place] = _changed(step, self.fault)
        return steps


def _changed(step: Step, fault: str) -> Step:
    match fault:
        case "root":
            return replace(step, root=(step.root + 1) % len(step.members))
        case "dtype":
            return replace(step, dtype="int32" if step.dtype == "float32" else "float32")
        case "length":
            return replace(step, elements=step.elements + 12)
        case "scale":
            return replace(step, scale=step.scale / 2)
        case _:
            return replace(step, operation="max" if step.operation == "sum" else "sum")


# --- drawing ------------------------------------------------------------------------------------


def drawn(seed: int) -> Sequence:
    """The sequence of a seed."""
    draw = random.Random(seed)
    transport = draw.choice(("memory", "memory", "hosts", "threads"))
    found = Sequence(seed, draw.randint(2, 4), transport)
    everyone = tuple(range(found.ranks))
    groups: dict[int, tuple[int, ...]] = {}
    for number in range(draw.randint(4, 12)):
        kinds = ["ltm"] if transport == "threads" else ["ltm", "dist", "dist", "groups"]
        match draw.choice(kinds):
            case "groups":
                found.steps.append(_drawn_change(draw, number, everyone, groups))
            case kind:
                found.steps.append(_drawn_call(draw, number, kind, everyone, groups))
    if seed % 2:
        _put_fault(draw, found)
    return found


def _drawn_change(draw, number: int, everyone: tuple, groups: dict) -> Step:
    choice = draw.random()
    if choice < 0.2:
        groups.clear()
        return Step(number, "new_world", members=everyone)
    if choice < 0.4 and groups:
        group = draw.choice(list(groups))
        return Step(number, "end_group", group, members=groups.pop(group))
    members = tuple(sorted(draw.sample(everyone, draw.randint(2, len(everyone)))))
    groups[number] = members
    return Step(number, "new_group", number, members=members)


def _drawn_call(draw, number: int, kind: str, everyone: tuple, groups: dict) -> Step:
    group = draw.choice([-1, *groups]) if kind == "dist" else -1
    members = groups.get(group, everyone)
    step = Step(
        number,
        draw.choice(DIST if kind == "dist" else LTM),
        group,
        draw.choice(SIZES),
        draw.choice(DTYPES),
        draw.randrange(len(members)),
        members=members,
        operation=draw.choice(("sum", "max")),
    )
    if step.call in ("reduce_scatter", "all_to_all", "scattered", "exchanged"):
        step = replace(step, elements=draw.choice((12, 1200, 60_000)))
    if step.call in _HAS_SCALE:
        step = replace(step, dtype=draw.choice(FLOATS), scale=draw.choice((1.0, 1.0, 0.5, 0.25)))
    if step.call == "average":
        step = replace(step, dtype=draw.choice(("float32", "float64")))
    return step


def _put_fault(draw, found: Sequence) -> None:
    """Choose a fault that the sequence has a step for."""
    for fault in draw.sample((*FAULTS, "scale", "scale"), len(FAULTS) + 2):
        if fault == "death" and found.transport == "threads":
            continue
        places = [k for k, step in enumerate(found.steps) if _fits(fault, step, found)]
        if places:
            found.fault, found.place = fault, draw.choice(places)
            found.rank = draw.choice(found.steps[found.place].members)
            return


def _fits(fault: str, step: Step, found: Sequence) -> bool:
    match fault:
        case "root":
            return step.call in _HAS_ROOT
        case "dtype" | "length":
            return step.call not in _HAS_NO_TENSOR
        case "scale":
            return step.call in _HAS_SCALE
        case "operation":
            return step.call in ("all_reduce", "sum", "reduce", "cpu_sum", "cpu_work")
        case "missing":
            return step.call not in ("new_group", "new_world", "end_group")
        case "order":
            following = found.steps[found.steps.index(step) + 1 :][:1]
            changes = ("new_group", "new_world", "end_group")
            return bool(following) and not {step.call, following[0].call} & {*changes}
        case _:
            return True


# --- running ------------------------------------------------------------------------------------


def given(step: Step, rank: int) -> torch.Tensor:
    """Return a rank's operand: small whole numbers, whose sums are exact in every dtype."""
    numbers = (torch.arange(step.elements) * 3 + 7 * rank + step.number) % 5
    return numbers.to(getattr(torch, step.dtype))


def total(step: Step) -> torch.Tensor:
    """Everyone's values, reduced."""
    parts = torch.stack([given(step, rank).double() for rank in step.members])
    return parts.sum(0) if step.operation == "sum" else parts.amax(0)


class Rank:
    """One rank as it runs its steps."""

    def __init__(self, rank: int, ranks: int, device: str, store: Any) -> None:
        self.rank, self.ranks, self.device, self.store = rank, ranks, device, store
        self.groups: dict[int, Any] = {-1: None}
        self.works: list[tuple[Any, torch.Tensor, Step]] = []

    def run(self, steps: list[Step]) -> None:
        for step in steps:
            if step.call in ("death", "exception"):
                _end(step.call)
            elif step.call in ("new_group", "new_world") or self.rank in step.members:
                getattr(self, f"_{step.call}")(step)
        self._wait_for_works()
        ltm.rendezvous("the end")
        if self.store is not None:
            dist.barrier()

    def tensor(self, step: Step) -> torch.Tensor:
        return given(step, self.rank).to(self.device)

    def expect(self, step: Step, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise WrongValue where it is not what plain arithmetic gives."""
        if not torch.equal(found.cpu().double(), expected.double()):
            raise WrongValue(f"{step} gave {found.flatten()[:4].tolist()} on rank {self.rank}")

    def own_part(self, step: Step, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(len(step.members))[step.members.index(self.rank)]

    # ltm

    def _all_reduce(self, step: Step) -> None:
        found = ltm.all_reduce(step.operation, self.tensor(step), scale=step.scale)
        self.expect(step, found, total(step) * step.scale)

    def _all_gather(self, step: Step) -> None:
        found = ltm.all_gather(self.tensor(step))
        self.expect(step, found, torch.cat([given(step, r) for r in step.members]))

    def _reduce_scatter(self, step: Step) -> None:
        x = self.tensor(step)
        found = ltm.reduce_scatter(step.operation, x, step.scale, 0, self.ranks)
        self.expect(step, found, self.own_part(step, total(step)) * step.scale)

    def _all_to_all(self, step: Step) -> None:
        found = ltm.all_to_all(self.tensor(step), 0, 0, self.ranks)
        self.expect(step, found, self._exchanged_values(step))

    def _exchanged_values(self, step: Step) -> torch.Tensor:
        return torch.cat([self.own_part(step, given(step, r)) for r in step.members])

    def _permute(self, step: Step) -> None:
        pairs = [(r, (r + 1) % self.ranks) for r in range(self.ranks)]
        found = ltm.collective_permute(self.tensor(step), pairs)
        self.expect(step, found, given(step, (self.rank - 1) % self.ranks))

    def _broadcast(self, step: Step) -> None:
        x = self.tensor(step)
        if step.group < 0 and (self.store is None or step.number % 2):
            ltm.collective_broadcast([x], step.root)
        else:
            dist.broadcast(x, step.members[step.root], group=self.groups[step.group])
        self.expect(step, x, given(step, step.members[step.root]))

    def _meet(self, step: Step) -> None:
        found = ltm.rendezvous(f"step {step.number}", b"%d" % self.rank)
        if found != [b"%d" % rank for rank in range(self.ranks)]:
            raise WrongValue(f"{step} gave {found}")

    # process groups

    def _sum(self, step: Step) -> None:
        x = self.tensor(step)
        operation = dist.ReduceOp.SUM if step.operation == "sum" else dist.ReduceOp.MAX
        dist.all_reduce(x, operation, group=self.groups[step.group])
        self.expect(step, x, total(step))

    def _average(self, step: Step) -> None:
        x = self.tensor(step)
        dist.all_reduce(x, dist.ReduceOp.AVG, group=self.groups[step.group])
        expected = total(replace(step, operation="sum")) / len(step.members)
        self.expect(step, x, expected.to(x.dtype))

    def _reduce(self, step: Step) -> None:
        x, root = self.tensor(step), step.members[step.root]
        x = x.double().to(torch.float32) if x.dtype is torch.bfloat16 else x
        operation = dist.ReduceOp.SUM if step.operation == "sum" else dist.ReduceOp.MAX
        dist.reduce(x, root, operation, group=self.groups[step.group])
        if self.rank == root:
            self.expect(step, x, total(step))

    def _gathered(self, step: Step) -> None:
        x = self.tensor(step)
        parts = [torch.empty_like(x) for _ in step.members]
        dist.all_gather(parts, x, group=self.groups[step.group])
        self.expect(step, torch.cat(parts), torch.cat([given(step, r) for r in step.members]))

    def _gather(self, step: Step) -> None:
        x, root = self.tensor(step), step.members[step.root]
        parts = [torch.empty_like(x) for _ in step.members] if self.rank == root else None
        dist.gather(x, parts, root, group=self.groups[step.group])
        if parts is not None:
            self.expect(step, torch.cat(parts), torch.cat([given(step, r) for r in step.members]))

    def _scatter(self, step: Step) -> None:
        root, x = step.members[step.root], self.tensor(step)
        parts = [x + k for k in range(len(step.members))] if self.rank == root else None
        found = torch.empty_like(x)
        dist.scatter(found, parts, root, group=self.groups[step.group])
        self.expect(step, found, given(step, root) + step.members.index(self.rank))

    def _scattered(self, step: Step) -> None:
        x = self.tensor(step)
        found = x.new_empty(step.elements // len(step.members))
        dist.reduce_scatter_tensor(found, x, group=self.groups[step.group])
        self.expect(step, found, self.own_part(step, total(replace(step, operation="sum"))))

    def _exchanged(self, step: Step) -> None:
        x = self.tensor(step)
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x, group=self.groups[step.group])
        self.expect(step, found, self._exchanged_values(step))

    def _barrier(self, step: Step) -> None:
        dist.barrier(group=self.groups[step.group])

    def _message(self, step: Step) -> None:
        sender, receiver = step.members[step.root], step.members[step.root - 1]
        x = self.tensor(step)
        if self.rank == sender:
            dist.send(x, receiver, group=self.groups[step.group])
        elif self.rank == receiver:
            dist.recv(x, sender, group=self.groups[step.group])
            self.expect(step, x, given(step, sender))

    def _objects(self, step: Step) -> None:
        found: list = [None] * len(step.members)
        dist.all_gather_object(found, {"rank": self.rank}, group=self.groups[step.group])
        if found != [{"rank": rank} for rank in step.members]:
            raise WrongValue(f"{step} gave {found}")

    def _cpu_sum(self, step: Step) -> None:
        _, x = self._begun_cpu_sum(step, False)
        self.expect(step, x, total(step))

    def _cpu_work(self, step: Step) -> None:
        work, x = self._begun_cpu_sum(step, True)
        self.works.append((work, x, step))

    def _begun_cpu_sum(self, step: Step, is_async: bool) -> tuple[Any, torch.Tensor]:
        x = given(step, self.rank)
        operation = dist.ReduceOp.SUM if step.operation == "sum" else dist.ReduceOp.MAX
        group = self.groups[step.group]
        return dist.all_reduce(x, operation, group=group, async_op=is_async), x

    def _wait_for_works(self) -> None:
        for work, x, step in self.works:
            work.wait()
            self.expect(step, x, total(step))
        self.works.clear()

    # groups

    def _new_group(self, step: Step) -> None:
        self.groups[step.group] = dist.new_group(list(step.members))

    def _end_group(self, step: Step) -> None:
        self._wait_for_works()
        dist.destroy_process_group(self.groups.pop(step.group))

    def _new_world(self, step: Step) -> None:
        self._wait_for_works()
        dist.barrier()
        dist.destroy_process_group()
        self.groups = {-1: None}
        self.begin_world(step.number)

    def begin_world(self, number: int) -> None:
        store = dist.PrefixStore(f"world {number}", self.store)
        dist.init_process_group("ltc", store=store, rank=self.rank, world_size=self.ranks)


class WrongValue(Exception):
    """A value that is not what plain arithmetic gives."""


class OwnError(Exception):
    """The exception that is the fault."""


def _end(how: str) -> None:
    if how == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OwnError("the fault")


def outcome(run: Callable[[], None]) -> list[str]:
    """(kind of end, text): "right", "PeerFailure", or the name of another error."""
    try:
        run()
        return ["right", ""]
    except BaseException as error:
        return [type(error).__name__, str(error)]


def run_process(found: Sequence, rank: int, path: str) -> list[str]:
    if found.transport == "hosts":
        os.environ["LTC_TRANSPORT"] = "hosts"
    store = dist.FileStore(path, found.ranks)
    one = Rank(rank, found.ranks, "ltc:0", store)

    def run() -> None:
        one.begin_world(-1)
        one.run(found.of(rank))

    return outcome(run)


def run_threads(found: Sequence) -> list[list[str]]:
    devices = [f"ltc:{k}" for k in range(found.ranks)]
    ends: list[list[str]] = [["hang", ""]] * found.ranks
    session.renew_threads(range(found.ranks))

    def run(rank: int) -> None:
        world.set_replication(devices[rank], devices)
        one = Rank(rank, found.ranks, devices[rank], None)
        ends[rank] = outcome(lambda: one.run(found.of(rank)))
        session.say_returned()

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(found.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    return list(ends)


LIMIT_SECONDS = 60.0  # of a sequence: a hang


def ends_of(found: Sequence, put_back: Callable[[], None], folder: str) -> list[list[str]]:
    """Return how each rank ended; the processes are forked from this one, which has no threads."""
    store = f"{folder}/store{found.seed}"
    in_processes = found.transport != "threads"
    running = {}
    for rank in range(found.ranks if in_processes else 1):
        child = os.fork()
        if child == 0:
            log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1), os.dup2(log, 2)
            put_back()
            faulthandler.dump_traceback_later(LIMIT_SECONDS - 5.0)
            ends = run_process(found, rank, store) if in_processes else run_threads(found)
            Path(folder, f"end{rank}").write_text(json.dumps(ends))
            os._exit(0)  # as a rank that has failed: the others learn of it
        running[child] = rank
    return _collected(running, folder, in_processes)


def _collected(running: dict[int, int], folder: str, in_processes: bool) -> list[list[str]]:
    def as_ends(*end: str) -> list[Any]:  # of one rank, or of the threads of all
        return list(end) if in_processes else [list(end)]

    deadline, ends = time.monotonic() + LIMIT_SECONDS, {}
    while running:
        for child, rank in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del running[child]
                left = Path(folder, f"end{rank}")
                code = os.waitstatus_to_exitcode(status)
                ends[rank] = (
                    json.loads(left.read_text()) if left.exists() else as_ends("died", str(code))
                )
                left.unlink(missing_ok=True)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                del running[child]
                ends[rank] = as_ends("hang", "")
        time.sleep(0.005)
    return [ends[rank] for rank in sorted(ends)] if in_processes else ends[0]


def judged(found: Sequence, ends: list[list[str]]) -> str:
    """Return the error in the ends of a sequence; "" if they are as they should be."""
    kinds = [kind for kind, *_ in ends]
    if all(kind == "right" for kind in kinds):
        is_message = bool(found.fault) and found.steps[found.place].call == "message"
        # a rank that neither sends nor takes it, and calls that come in any order, make no difference
        is_harmless = not found.fault or is_message or found.fault == "order"
        return "" if is_harmless else "the fault was not found"
    if not found.fault:
        return f"without a fault: {ends}"
    for rank, (kind, text) in enumerate(ends):
        if kind == "PeerFailure" and (Path(__file__).name in text or "eplica" in text):
            continue
        own = {"death": ("died",), "exception": ("OwnError",)}.get(found.fault, ())
        if rank == found.rank and kind in own:
            continue
        return f"rank {rank} ended with {kind}: {text[:300]}"
    return ""


# --- faults put back ----------------------------------------------------------------------------


def _no_scale() -> None:
    """Leave the scale of a sum out of the replicas' comparison."""
    for module in (recorded_sums, collectives):
        module.agreed_scale = lambda scale, like: ("", [])


def _by_name() -> None:
    """Find the ranks' shared files by the name of their group, so that they outlive it."""
    make, known = group_calls._made, {}

    def made(group, store, ranks):
        key = group.group_name
        if key not in known:
            known[key] = make(group, store, ranks)
        return known[key]

    group_calls._made = made


def _not_compared() -> None:
    """gloo makes every call that a rank asks for."""
    for log in (call_log.SharedMemoryCallLog, call_log.StoreCallLog):
        log.compare = lambda self, lane, number, tag: None


def _error_of_gloo() -> None:
    """A connection that breaks gives gloo's own text."""
    communicator.is_broken_connection = lambda error: False


PUT_BACK: dict[str, Callable[[], None]] = {
    "scale": _no_scale,
    "names": _by_name,
    "gloo": _not_compared,
    "connection": _error_of_gloo,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="number of sequences")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--put-back", choices=[*PUT_BACK], help="an old fault: until it is found")
    parser.add_argument("--verbose", action="store_true", help="a line for each sequence")
    chosen = parser.parse_args()
    put_back = PUT_BACK.get(chosen.put_back, lambda: None)
    wrong, faults, began = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(chosen.first, chosen.first + chosen.count):
            found = drawn(seed)
            faults += bool(found.fault)
            started = time.monotonic()
            ends = ends_of(found, put_back, folder)
            reason = judged(found, ends)
            what = f"seed {seed}: {found.ranks} ranks, {found.transport}, {len(found.steps)} steps"
            what += f", {found.fault} in rank {found.rank}" if found.fault else ""
            if reason:
                wrong += 1
                print(f"{what} WRONG: {reason}", flush=True)
                if "hang" in reason:
                    print(*[path.read_text() for path in sorted(Path(folder).glob("log*"))])
                if chosen.put_back:
                    print(
                        f"{chosen.put_back!r} was found after {seed - chosen.first + 1} sequences"
                    )
                    return 0
            elif chosen.verbose:
                print(f"{what}: {time.monotonic() - started:.1f} s", flush=True)
    print(
        f"{chosen.count} sequences, {faults} with a fault: {wrong} wrong, "
        f"{time.monotonic() - began:.0f} s"
    )
    return int(wrong > 0 or chosen.put_back is not None)


if __name__ == "__main__":
    sys.exit(main())
