"""A data loader that knows how far a training has got, and the random numbers of a process."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy
import torch
from torch.utils.data import Sampler

from ltc.device.recording.recorder import devices
from ltc.distributed import world


class Resumable:
    """A loader that goes on, after `load_state_dict`, behind the last batch it had given out.

    Without a sampler, going on repeats the interrupted pass up to the batch that follows, from the
    random state that it began with, so any loader will do, and shuffling is as it was. With one
    nothing is read again, and the number of replicas may be another one.

    A loader with `state_dict` and `load_state_dict` of its own, such as torchdata's
    StatefulDataLoader, is placed by these: it reads again what its own state does not hold.

    The generators of the loader and of its samplers, such as DataLoader(generator=...), are kept as
    well. Those that the saved loader had not go on as they are.

    Attributes:
        sampler: An ElasticSampler that the loader takes its order from: it is told where to go on.
        loader: Whatever the training loop iterates over; put this outermost, because a loader that
            fetches ahead has given out more than was trained on.
        epoch: Passes over the loader that are complete.

    Example:
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
        self._keeps_its_place = sampler is None and _has_state(loader)
        self._placed: dict[str, Any] | None = None  # the loader's own state, if it goes on by that
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
        if self._placed is None:
            for _ in range(self._skip):
                next(batches)
        else:  # it has drawn again what it had drawn before, in an order of its own
            _restore_generators(self._loader, self._placed["generators"])
        self._skip, self._placed = 0, None
        restore_random_state(now)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the training's position, for `load_state_dict`."""
        under_way, now = self._drawn_from, _states_of_generators(self._loader)
        state = {
            "epoch": self.epoch,
            "given": self._given,
            "begun_with": self._begun_with,
            "generators": now if under_way is None else under_way,
        }
        if self._keeps_its_place:
            state["loader"] = {"state": self._loader.state_dict(), "generators": now}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, in the next pass, behind the batches that `state_dict` knew of."""
        self.epoch, self._given = state["epoch"], state["given"]
        self._begun_with, self._skip = state["begun_with"], state["given"]
        self._drawn_from = state.get("generators")  # older checkpoints have none
        _restore_generators(self._loader, self._drawn_from or ())
        self._placed = state.get("loader") if self._keeps_its_place else None
        if self._placed is not None and (self._skip or not self._drawn_from):
            # Between two passes generators say all: a loader that is over would draw once more.
            self._loader.load_state_dict(self._placed["state"])


def _has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _restore_generators(loader: Any, states: Iterable[torch.Tensor]) -> None:
    for generator, saved in zip(generators_of(loader), states):
        generator.set_state(saved)


# Where a loader keeps what draws for it: torch's own, ltc's, and loaders around another one.
_INNER = ("sampler", "batch_sampler", "loader", "_loader", "dataloader", "base_dataloader")


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader, or a loader or sampler inside it, has of its own, each once.

    torch's default generator is no loader's own.

    Example:
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

    Example:
        >>> from ltc.checkpointing.resumable import random_state
        >>> sorted(random_state())
        ['ltc', 'numpy', 'python', 'torch']
    """
    on_devices = [device.random.as_tensor() for device in devices()]
    return {**random_state_of_host(), "ltc": on_devices}


def restore_random_state(state: dict[str, Any]) -> None:
    """Draw from here on what was drawn after `random_state`; devices that are missing are left out.

    Example:
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

    Example:
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

    Example:
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


# --- The order of samples of a training whose number of replicas may change while it goes on -----


class ElasticSampler(Sampler[list[int]]):
    """The numbers of this replica's samples of each batch of all replicas together.

    The samples of a step do not depend on the number of replicas. Samples that do not fill a batch
    are left out of the epoch. As the `batch_sampler` of a DataLoader, and as the `sampler` of a
    `Resumable` around it, it goes on at the step that a checkpoint knows of.

    Args:
        samples: The data set, or any object of its length.
        batch_size: The samples of a batch of all replicas together, a multiple of their number.
        shuffle: Draw the order of each epoch, from `seed` and the epoch's number alone.
        replicas, ordinal: The number of replicas and this one's; None: the world's when an epoch
        begins.

    Raises:
        ValueError: For a batch of less than one sample or more than there are; when an epoch
            begins, for a batch that does not divide by the number of replicas.

    Example:
        >>> from ltc.checkpointing.resumable import ElasticSampler
        >>> alone = ElasticSampler(range(9), batch_size=4, shuffle=False)
        >>> list(alone)
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        >>> [list(ElasticSampler(range(9), 4, False, replicas=2, ordinal=k)) for k in range(2)]
        [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """

    def __init__(
        self,
        samples: Sized,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        replicas: int | None = None,
        ordinal: int | None = None,
    ):
        if not 1 <= batch_size <= len(samples):
            raise ValueError(
                f"batch_size={batch_size} is the size of a batch of all replicas together: it must be "
                f"from 1 to {len(samples)}, the number of samples."
            )
        self._length, self._batch_size = len(samples), batch_size
        self._shuffle, self._seed = shuffle, seed
        self._replicas, self._ordinal = replicas, ordinal
        self._epoch, self._first = 0, 0

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return self._length // self._batch_size

    def begin_at(self, epoch: int, given: int) -> None:
        """Make the next pass the one of `epoch`, without its first `given` batches."""
        self._epoch, self._first = epoch, given

    def __iter__(self) -> Iterator[list[int]]:
        replicas = world.world_size() if self._replicas is None else self._replicas
        ordinal = world.ordinal() if self._ordinal is None else self._ordinal
        if self._batch_size % replicas:
            raise ValueError(
                f"A batch of {self._batch_size} samples cannot be divided among {replicas} replicas: "
                f"batch_size must be a multiple of {replicas}."
            )
        share = self._batch_size // replicas
        order = self._order()
        for step in range(self._first, len(self)):
            first = step * self._batch_size + ordinal * share
            yield order[first : first + share]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        # a seed for each pair: those of neighbouring epochs and seeds are not to meet
        drawn = torch.Generator().manual_seed(self._seed)
        seeds = torch.randint(2**62, (self._epoch + 1,), generator=drawn, device="cpu")
        of_epoch = torch.Generator().manual_seed(int(seeds[-1]))
        return torch.randperm(self._length, generator=of_epoch, device="cpu").tolist()
