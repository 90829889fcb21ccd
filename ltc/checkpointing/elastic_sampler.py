"""The order of samples of a training whose number of replicas may change while it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from ltc.distributed import world


class ElasticSampler(Sampler[list[int]]):
    """Of each batch of all replicas together, the numbers of this replica's samples.

    samples     the data set, or whatever has its length
    batch_size  of all replicas together; it divides by their number
    shuffle     draw the order of each epoch, from `seed` and the epoch's number alone
    replicas, ordinal  the world's where None, asked for when an epoch begins

    Which samples a step trains on does not depend on how many replicas there are. What does not
    fill a batch is left out of the epoch. As the `batch_sampler` of a DataLoader, and as the
    `sampler` of a `Resumable` around it, it goes on at the step that a checkpoint knows of.

    Raises ValueError for a batch of less than one sample or more than there are; where an epoch
    begins, for a batch that does not divide by the number of replicas.

    >>> from ltc.checkpointing.elastic_sampler import ElasticSampler
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
                f"batch_size={batch_size}: it is of all replicas together, and there are "
                f"{len(samples)} samples."
            )
        self._length, self._batch_size = len(samples), batch_size
        self._shuffle, self._seed = shuffle, seed
        self._replicas, self._ordinal = replicas, ordinal
        self._epoch, self._first = 0, 0

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self._length // self._batch_size

    def begin_at(self, epoch: int, given: int) -> None:
        """The next pass is that of `epoch`, without its first `given` batches."""
        self._epoch, self._first = epoch, given

    def __iter__(self) -> Iterator[list[int]]:
        replicas = world.world_size() if self._replicas is None else self._replicas
        ordinal = world.ordinal() if self._ordinal is None else self._ordinal
        if self._batch_size % replicas:
            raise ValueError(
                f"A batch of {self._batch_size} samples does not divide by {replicas} replicas."
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
