"""Loaders at random: a source, batches, and loops over both; compared with what the source gives alone.

The program of a seed is made twice.  One copy of its source is iterated as it is, the other one
through a loader of ltc.  Both have to give the same batches, and raise the same errors.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset

import ltc.distributed.parallel_loader as pl

DEVICES = ["ltc:0", "ltc:1"]
WORKERS_OF_TEN = 1  # of ten programs, those whose DataLoader has workers

# --- batches ---------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


class Named(dict):
    """A dictionary with an attribute."""


class Marked(torch.Tensor):
    """A subclass that torch moves as it moves others."""


class Movable:
    """Moves itself, as the batches of many libraries do."""

    def __init__(self, x: Any):
        self.x = x

    def to(self, device: Any) -> Movable:
        self.x = self.x.to(device)
        return self


@dataclasses.dataclass(frozen=True)
class Record:
    x: Any
    size: tuple = (1, (2, 3))


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


def _named(x: Any) -> Named:
    batch = Named(x=(x, 1))
    batch.extra = [x]
    return batch


def _twice(x: Any) -> list:
    return [x, {"again": x}]


def _cycle(x: Any) -> list:
    batch = [x]
    batch.append(Pair(batch, x * 2))
    return batch


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, (x + 1, "name")),
    "dict": lambda x: {"x": x, "n": 3, "none": None, (1, (2,)): [x * 2]},
    "named tuple": lambda x: Pair(x, (x + 1, 2)),
    "return type": lambda x: torch.max(x.reshape(1, -1), 1),
    "record": Record,
    "slotted": lambda x: [Slotted([x])],
    "namespace": lambda x: types.SimpleNamespace(x=x, size=(1, 2)),
    "ordered": lambda x: collections.OrderedDict(b=x, a=x + 1),
    "default": lambda x: collections.defaultdict(list, {"x": [x]}),
    "user dict": lambda x: collections.UserDict(x=x),
    "named dict": _named,
    "proxy": lambda x: types.MappingProxyType({"x": x}),
    "deque": lambda x: collections.deque([x, x + 1], maxlen=2),
    "packed": lambda x: pack_sequence([x.reshape(-1)]),
    "sparse": lambda x: (x.reshape(1, -1) + 1).to_sparse(),
    "subclass": lambda x: x.as_subclass(Marked),
    "parameter": lambda x: torch.nn.Parameter(x),
    "gradient": lambda x: x.clone().requires_grad_(),
    "complex": lambda x: torch.complex(x, x).conj(),
    "movable": Movable,
    "array": lambda x: {"x": x, "n": x.numpy()},
    "twice": _twice,
    "cycle": _cycle,
    "half": lambda x: [x.half(), x.long(), x > 2, x[..., :0]],
    "strided": lambda x: x.expand(3, *x.shape).transpose(0, 1),
}


def described(x: Any, plain: bool = True, above: tuple = ()) -> Any:
    """Everything of a batch but its device, as strings and tuples; a plain tuple counts as a list."""
    if id(x) in above:
        return "above", len(above) - above.index(id(x))
    above = (*above, id(x))
    if isinstance(x, torch.Tensor):
        value = x.detach().cpu()
        value = value.to_dense() if value.is_sparse else value.resolve_conj()
        kind = type(x).__name__, str(x.dtype), tuple(x.shape), str(x.layout), x.requires_grad
        return *kind, str(value.as_subclass(torch.Tensor).tolist())
    if isinstance(x, numpy.ndarray):
        return "array", x.dtype.str, x.tolist()
    kind = type(x)
    name = "list" if kind is tuple and plain else kind.__name__
    plain = plain and kind in (
        list, tuple, dict, collections.OrderedDict, collections.defaultdict, collections.deque
    )  # fmt: skip
    if isinstance(x, (dict, types.MappingProxyType)):
        parts = [(str(key), described(value, plain, above)) for key, value in x.items()]
    elif isinstance(x, (list, tuple, collections.deque)):
        parts = [described(part, plain, above) for part in x]
    else:
        parts = None
    slots = [(slot, getattr(x, slot)) for slot in getattr(kind, "__slots__", ())]
    attributes = [*slots, *getattr(x, "__dict__", {}).items()]
    if parts is None and not attributes:
        return name, repr(x)
    return name, parts, [(key, described(value, False, above)) for key, value in attributes]


def tensors_of(x: Any, met: set[int]) -> Iterator[torch.Tensor]:
    """The tensors of a batch that have to be on its device."""
    if id(x) in met:
        return
    met.add(id(x))
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, PackedSequence):  # the sizes of its batches stay on the host
        yield x.data
    else:
        parts = list(x.values()) if isinstance(x, (dict, types.MappingProxyType)) else []
        parts += list(x) if isinstance(x, (list, tuple, collections.deque)) else []
        parts += [getattr(x, slot) for slot in getattr(type(x), "__slots__", ())]
        for part in [*parts, *getattr(x, "__dict__", {}).values()]:
            yield from tensors_of(part, met)


# --- sources ---------------------------------------------------------------------------------------


class Samples(Dataset):
    """Batches by number; one of them may raise."""

    def __init__(self, count: int, make: Callable[[torch.Tensor], Any], bad: int | None):
        self.count, self.make, self.bad = count, make, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise KeyError("sample", index)
        return self.make(torch.arange(4.0) + index)

    def __iter__(self) -> Iterator:
        return (self[index] for index in range(self.count))


class Stream:
    """Its own iterator, which has one pass."""

    def __init__(self, samples: Samples):
        self.samples, self.at = samples, 0

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.samples):
            raise StopIteration
        self.at += 1
        return self.samples[self.at - 1]


class Restarting(Stream):
    """Its own iterator, which begins anew with each loop."""

    def __iter__(self) -> Restarting:
        self.at = 0
        return self


class Refilled:
    """Uses the memory of one batch, and its containers, for all."""

    def __init__(self, samples: Samples):
        self.samples = samples

    def __iter__(self) -> Iterator:
        memory = numpy.zeros(4, numpy.float32)
        values: list = [torch.from_numpy(memory), None, bytearray(1), memory]
        for index in range(len(self.samples)):
            self.samples[index]  # which may raise
            memory[:] = numpy.arange(4) + index
            values[1], values[2][0] = index, index
            yield values
        memory[:] = -1


def _list(samples: Samples) -> list:
    return list(dataclasses.replace(_Plain(samples), bad=None))


@dataclasses.dataclass
class _Plain:
    samples: Samples
    bad: int | None = None

    def __iter__(self) -> Iterator:
        return (self.samples.make(torch.arange(4.0) + k) for k in range(self.samples.count))


def _loader(workers: int, persistent: bool = False) -> Callable[[Samples], DataLoader]:
    def made(samples: Samples) -> DataLoader:
        return DataLoader(
            samples, batch_size=None, num_workers=workers, persistent_workers=persistent
        )

    return made


SOURCES: dict[str, Callable[[Samples], Any]] = {
    "list": _list,
    "iterable": lambda samples: samples,
    "generator": iter,
    "list iterator": lambda samples: iter(_list(samples)),
    "stream": Stream,
    "restarting": Restarting,
    "refilled": Refilled,
    "refilled stream": lambda samples: iter(Refilled(samples)),
    "loader": _loader(0),
    "loader's iterator": lambda samples: iter(_loader(0)(samples)),
}
WITH_WORKERS: dict[str, Callable[[Samples], Any]] = {
    "workers": _loader(2),
    "persistent workers": _loader(2, persistent=True),
}
ALL_SOURCES = WITH_WORKERS | SOURCES
SENT_BY_WORKERS = ["tensor", "tuple", "dict", "named tuple", "record", "ordered", "movable"]

# --- loops -----------------------------------------------------------------------------------------

Log = list[Any]


def to_the_end(loader: Any, log: Log, at: int) -> None:
    log.extend(loader)


def left_early(loader: Any, log: Log, at: int) -> None:
    for number, batch in enumerate(loader):
        log.append(batch)
        if number == at:
            break


def left_often(loader: Any, log: Log, at: int) -> None:
    for number in range(5):
        left_early(loader, log, (at + number) % 3)


def side_by_side(loader: Any, log: Log, at: int) -> None:
    for pair in zip(loader, loader):
        log.extend(pair)


def side_by_side_left_early(loader: Any, log: Log, at: int) -> None:
    for number, pair in enumerate(zip(loader, loader)):
        log.extend(pair)
        if number == at:
            break


def nested(loader: Any, log: Log, at: int) -> None:
    for number, batch in enumerate(loader):
        log.append(batch)
        if number < 2:
            left_early(loader, log, at)


def begun_again(loader: Any, log: Log, at: int) -> None:
    batches = iter(loader)
    for _ in range(at):
        log.append(next(batches, "the end"))
    batches = iter(loader)
    log.append(next(batches, "the end"))


def in_a_thread(loader: Any, log: Log, at: int) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            left_early(loader, log, at)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


LOOPS = (to_the_end, left_early, left_early, left_often, side_by_side, side_by_side_left_early,
         nested, begun_again, in_a_thread)  # fmt: skip


# --- programs --------------------------------------------------------------------------------------


class Program:
    """What a seed means: a source, a form of batches, and loops over a loader.

    source  the kind of it, where not any will do
    """

    def __init__(self, seed: int, source: str | None = None):
        draw = random.Random(seed)
        self.count, self.devices = draw.randrange(14), draw.choice([1, 1, 2])
        self.bad = draw.choice([None, None, None, draw.randrange(14)])
        has_workers = draw.randrange(10) < WORKERS_OF_TEN
        self.source = draw.choice(list(WITH_WORKERS if has_workers else SOURCES))
        if source is not None:
            self.source, has_workers = source, source in WITH_WORKERS
        self.form = draw.choice(SENT_BY_WORKERS if has_workers else list(FORMS))
        if self.form == "sparse":
            self.devices = 1
        count = draw.randrange(1, 5)
        self.loops = [(draw.choice(LOOPS), draw.randrange(6)) for _ in range(count)]
        self.wraps_anew = draw.random() < 0.2
        self.sizes = {
            "loader_prefetch_size": draw.randrange(1, 5),
            "device_prefetch_size": draw.randrange(1, 3),
        }

    def __str__(self) -> str:
        loops = ", ".join(f"{loop.__name__} {at}" for loop, at in self.loops)
        anew = ", each by a new loader" if self.wraps_anew else ""
        return (
            f"{self.source} of {self.count} x {self.form}, bad {self.bad}, {self.devices} devices, "
            f"{self.sizes}: {loops}{anew}"
        )

    def made(self) -> Any:
        samples = Samples(self.count, FORMS[self.form], self.bad)
        return ALL_SOURCES[self.source](samples)


def judged(seed: int, source: str | None = None) -> str:
    """What is wrong with ltc's loaders in the program of a seed; "" where nothing is."""
    program = Program(seed, source)
    with contextlib.ExitStack() as stack:
        expected = alone(program)
        found = by_ltc(program, stack)
    for thread in threading.enumerate():
        if thread.name.startswith("ltc loader"):
            thread.join()  # one that stays is a hang
    for number, (right, given) in enumerate(zip(expected, found, strict=True)):
        if right != given:
            return f"{program}\n    loop {number} gave {given}\n    in place of {right}"
    return ""


def alone(program: Program) -> list[list]:
    source = program.made()
    if program.devices == 2:
        rounds = Rounds(source)
        return [rounds.loop(at) for _, at in program.loops]
    return [_logged(loop, Described(source), at) for loop, at in program.loops]


def by_ltc(program: Program, stack: contextlib.ExitStack) -> list[list]:
    source = program.made()
    if program.devices == 2:
        loader = pl.ParallelLoader(source, DEVICES, **program.sizes)
        stack.callback(loader.close)
        return [of_both(loader, at) for _, at in program.loops]

    def wrapped() -> Any:
        return Described(pl.MpDeviceLoader(source, DEVICES[0], **program.sizes), DEVICES[0])

    loader = wrapped()
    return [
        _logged(loop, wrapped() if program.wraps_anew else loader, at) for loop, at in program.loops
    ]


class Described:
    """A loader whose batches are described as they come; each tensor has to be on the device."""

    def __init__(self, loader: Any, device: str | None = None):
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator:
        return map(self.described, iter(self.loader))

    def described(self, batch: Any) -> Any:
        return described_there(batch, self.device)


def described_there(batch: Any, device: str | None) -> Any:
    if device is not None:
        for tensor in tensors_of(batch, set()):
            if str(tensor.device) != device:
                return f"a tensor is on {tensor.device}, and not on {device}"
    return described(batch)


def _logged(loop: Callable, loader: Any, at: int) -> Log:
    log: Log = []
    try:
        loop(loader, log, at)
    except Exception as error:
        log.append((type(error).__name__, str(error).splitlines()[0]))
    return log


class Rounds:
    """What two devices get of a source, round by round."""

    def __init__(self, source: Any):
        self.source, self.left = source, []
        self.is_stream = iter(source) is source and not isinstance(source, Restarting)

    def loop(self, rounds: int) -> Log:
        """The batches of so many rounds; of a stream, a round that is not complete is kept."""
        log, batches = [], iter(self.source)
        pair = self.left if self.is_stream else []
        try:
            for _ in range(rounds):
                while len(pair) < len(DEVICES):
                    pair.append(described(next(batches)))
                log += pair
                pair.clear()
        except StopIteration:
            pass
        except Exception as error:
            log.append((type(error).__name__, str(error).splitlines()[0]))
        return log


def of_both(loader: pl.ParallelLoader, rounds: int) -> Log:
    """The same by two consumers in turn."""
    log: Log = []
    try:
        consumers = [iter(loader.per_device_loader(device)) for device in DEVICES]
        for _ in range(rounds):
            for device, consumer in zip(DEVICES, consumers):
                batch = next(consumer, None)
                if batch is None:
                    return log
                log.append(described_there(batch, device))
    except Exception as error:
        log.append((type(error).__name__, str(error).splitlines()[0]))
    return log
