"""A training that goes on after a death, on the same or on another number of replicas."""

import pytest
import torch
from torch.utils.data import DataLoader

import ltc.distributed.parallel_loader as pl
from ltc.checkpointing.resumable import ElasticSampler, Resumable


def batches_of(replicas: int, ordinal: int, epoch: int, first: int = 0) -> list[list[int]]:
    sampler = ElasticSampler(range(50), 12, seed=3, replicas=replicas, ordinal=ordinal)
    sampler.begin_at(epoch, first)
    return list(sampler)


def test_a_step_trains_on_the_same_samples_on_any_number_of_replicas():
    alone = batches_of(1, 0, epoch=2)
    for replicas in (2, 3, 4):
        parts = [batches_of(replicas, k, epoch=2) for k in range(replicas)]
        assert [sum(shares, []) for shares in zip(*parts, strict=True)] == alone
    assert len(alone) == 4 and len(set(sum(alone, []))) == 48
    assert batches_of(1, 0, epoch=3) != alone


def test_from_two_replicas_to_one_and_back_no_sample_is_left_out_or_repeated():
    lives = [(2, 0, 1), (1, 1, 3), (2, 3, 4)]  # replicas, first step, step of the next life
    seen = [
        sum((batches_of(replicas, k, 0, first)[step - first] for k in range(replicas)), [])
        for replicas, first, end in lives
        for step in range(first, end)
    ]
    assert seen == batches_of(1, 0, epoch=0)


def test_a_batch_has_to_divide_by_the_replicas():
    with pytest.raises(ValueError, match="12 samples cannot be divided among 5 replicas"):
        batches_of(5, 0, epoch=0)
    with pytest.raises(ValueError, match="must be from 1 to 3"):
        ElasticSampler(range(3), 4)


class Reading(torch.utils.data.Dataset):
    """Numbers, and which of them were read."""

    def __init__(self):
        self.read: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, k: int) -> torch.Tensor:
        self.read.append(k)
        return torch.tensor(float(k))


def loader_over(data: Reading) -> Resumable:
    sampler = ElasticSampler(data, 4, seed=1)
    loader = DataLoader(data, batch_sampler=sampler)
    return Resumable(pl.MpDeviceLoader(loader, "ltc"), sampler=sampler)


def test_a_loader_that_reads_ahead_goes_on_where_the_training_was_and_reads_nothing_twice():
    whole = loader_over(Reading())
    expected = [batch.tolist() for _ in range(2) for batch in whole]
    assert whole.epoch == 2
    loader, given = loader_over(Reading()), []
    for batch in loader:
        given.append(batch.tolist())
        if len(given) == 3:
            break
    data = Reading()
    later = loader_over(data)
    later.load_state_dict(loader.state_dict())
    while later.epoch < 2:
        given += [batch.tolist() for batch in later]
    assert given == expected
    assert len(data.read) == 2 * 4 + 20
