"""A data loader that knows how far a training has got, and the random numbers of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from ltc.checkpointing.elastic_sampler import ElasticSampler
from ltc.device.recording.recorder import devices


class Resumable:
    """A loader that goes on, after `load_state_dict`, behind the last batch it had given out.

    loader  whatever the training loop iterates over; put this outermost, because a loader that
            fetches ahead has given out more than was trained on
    sampler an ElasticSampler that the loader takes its order from: it is told where to go on
    epoch   passes over the loader that are complete

    Without a sampler, going on repeats the interrupted pass up to the batch that follows, from the
    random state that it began with, so any loader will do, and shuffling is as it was. With one
    nothing is read again, and the number of replicas may be another one.

    The generators of the loader and of its samplers, such as DataLoader(generator=...), are kept as
    well. Those that the saved loader had not go on as they are.

    >>> from ltc.checkpointing.resumable import Resumable
    >>> loader = Resumable(["a", "b", "c"])
    >>> print(next(iter(loader)))
    a
    >>> other = Resumable(["a", "b", "c"])  # of the next process
    >>> other.load_state_dict(loader.state_dict())
    >>> list(other)
    ['b', 'c']
    """

    def __init__(self, loader: Any, sampler: ElasticSampler | None = None):
        self._loader, self._sampler = loader, sampler
        self._begun_with: dict | None = None  # random state at the start of the pass under way
        self._drawn_from: list[torch.Tensor] | None = None  # the loader's own generators, as then
        self._given = 0  # batches of that pass
        self._skip = 0  # of them, those the next pass leaves out
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if not self._skip or self._drawn_from is None:
            self._drawn_from = _states_of_generators(self._loader)
        if self._sampler is not None:
            batches = self._told(self._sampler)
        else:
            batches = self._continued() if self._skip else self._started()
        for batch in batches:
            self._given += 1
            yield batch
        self.epoch += 1
        self._begun_with, self._drawn_from, self._given = None, None, 0

    def _told(self, sampler: ElasticSampler) -> Iterator[Any]:
        self._given, self._skip = self._skip, 0
        sampler.begin_at(self.epoch, self._given)
        return iter(self._loader)

    def _started(self) -> Iterator[Any]:
        self._begun_with, self._given = random_state(), 0
        return iter(self._loader)

    def _continued(self) -> Iterator[Any]:
        now = random_state()  # with the devices': a loader's marks move theirs
        assert self._begun_with is not None
        if "ltc" in self._begun_with:
            restore_random_state(self._begun_with)
        else:  # of an older checkpoint
            restore_random_state_of_host(self._begun_with)
        batches = iter(self._loader)
        for _ in range(self._skip):
            next(batches)
        self._skip = 0
        restore_random_state(now)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """How far the training has got, for `load_state_dict`."""
        under_way = self._drawn_from
        return {
            "epoch": self.epoch,
            "given": self._given,
            "begun_with": self._begun_with,
            "generators": _states_of_generators(self._loader) if under_way is None else under_way,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, in the next pass, behind the batches that `state_dict` knew of."""
        self.epoch, self._given = state["epoch"], state["given"]
        self._begun_with, self._skip = state["begun_with"], state["given"]
        self._drawn_from = state.get("generators")  # older checkpoints have none
        for generator, saved in zip(generators_of(self._loader), self._drawn_from or ()):
            generator.set_state(saved)


# Where a loader keeps what draws for it: torch's own, ltc's, and loaders around another one.
_INNER = ("sampler", "batch_sampler", "loader", "_loader", "dataloader", "base_dataloader")


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader, or a loader or sampler inside it, has of its own, each once.

    torch's default generator is no loader's own.

    >>> from ltc.checkpointing.resumable import generators_of
    >>> own = torch.Generator()
    >>> generators_of(torch.utils.data.DataLoader([1, 2], shuffle=True, generator=own)) == [own]
    True
    """
    met: dict[int, Any] = {}
    found: dict[int, torch.Generator] = {}
    waiting = [loader]
    while waiting:
        one = waiting.pop(0)
        if id(one) in met or not hasattr(one, "__dict__"):
            continue
        met[id(one)] = one
        held = [value for value in vars(one).values() if isinstance(value, torch.Generator)]
        found.update((id(g), g) for g in held if g is not torch.default_generator)
        waiting += [vars(one)[name] for name in _INNER if name in vars(one)]
    return list(found.values())


def _states_of_generators(loader: Any) -> list[torch.Tensor]:
    """The states of a loader's own generators, as tensors, in the order of `generators_of`."""
    return [generator.get_state() for generator in generators_of(loader)]


def random_state() -> dict[str, Any]:
    """The random state of Python, NumPy, torch's CPU and every ltc device.

    >>> from ltc.checkpointing.resumable import random_state
    >>> sorted(random_state())
    ['ltc', 'numpy', 'python', 'torch']
    """
    on_devices = [device.random.as_tensor() for device in devices()]
    return {**random_state_of_host(), "ltc": on_devices}


def restore_random_state(state: dict[str, Any]) -> None:
    """Draw from here on what was drawn after `random_state`; devices that are missing are left out.

    >>> from ltc.checkpointing.resumable import random_state, restore_random_state
    >>> state = random_state()
    >>> first = torch.rand(3, device="ltc")
    >>> restore_random_state(state)
    >>> torch.equal(first, torch.rand(3, device="ltc"))
    True
    """
    restore_random_state_of_host(state)
    for device, saved in zip(devices(), state["ltc"]):
        device.random.restore(saved)


def random_state_of_host() -> dict[str, Any]:
    """The random state of Python, NumPy and torch's CPU, as numbers and tensors.

    >>> from ltc.checkpointing.resumable import random_state_of_host
    >>> sorted(random_state_of_host())
    ['numpy', 'python', 'torch']
    """
    version, words, gauss = random.getstate()
    state: Any = numpy.random.get_state()
    kind, keys, *numbers = state
    return {
        "python": (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss),
        "numpy": (kind, torch.from_numpy(keys.copy()), *(number.real for number in numbers)),
        "torch": torch.get_rng_state(),
    }


def restore_random_state_of_host(state: dict[str, Any]) -> None:
    """Draw from here on, on the host, what was drawn after `random_state_of_host`.

    >>> from ltc.checkpointing import resumable
    >>> state, first = resumable.random_state_of_host(), torch.rand(3)
    >>> resumable.restore_random_state_of_host(state)
    >>> torch.equal(first, torch.rand(3))
    True
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy(), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
