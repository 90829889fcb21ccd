"""A resumed training sees the samples and draws the numbers of one that never stopped."""

import warnings

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import ltc.distributed.parallel_loader as pl
from ltc.checkpointing.resumable import Resumable, generators_of
from ltc.utils.checkpoint import CheckpointManager

DATA = TensorDataset(torch.arange(12.0).view(12, 1))
PASS = 4  # batches of three samples


def own():
    return torch.Generator().manual_seed(4)


def of_a_sampler(**options):
    return RandomSampler(DATA, generator=own(), **options)


def behind_a_device_loader(**options):
    return pl.MpDeviceLoader(DataLoader(DATA, batch_size=3, shuffle=True, **options), "ltc")


LOADERS = {
    "torch's generator": lambda: DataLoader(DATA, batch_size=3, shuffle=True),
    "the loader's": lambda: DataLoader(DATA, batch_size=3, shuffle=True, generator=own()),
    "the sampler's": lambda: DataLoader(DATA, batch_size=3, sampler=of_a_sampler()),
    "a sampler's with replacement": lambda: DataLoader(
        DATA, batch_size=3, sampler=of_a_sampler(replacement=True)
    ),
    "the batch sampler's": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(of_a_sampler(), 3, drop_last=False)
    ),
    "a device loader": behind_a_device_loader,
    "a device loader with a generator": lambda: behind_a_device_loader(generator=own()),
    "a consumer of a device loader": lambda: pl.ParallelLoader(
        DataLoader(DATA, batch_size=3, shuffle=True, generator=own()), ["ltc"]
    ).per_device_loader("ltc"),
}


def stateful(**options):
    of_torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="it has the loader")
    return of_torchdata.StatefulDataLoader(DATA, batch_size=3, **options)


STATEFUL = {
    "a stateful loader": lambda: stateful(shuffle=True),
    "a stateful loader's": lambda: stateful(shuffle=True, generator=own()),
    "a stateful sampler's": lambda: stateful(sampler=of_a_sampler(replacement=True)),
    "workers of a stateful loader": lambda: stateful(shuffle=True, generator=own(), num_workers=1),
    "a stateful loader behind a device loader": lambda: pl.MpDeviceLoader(
        stateful(shuffle=True, generator=own()), "ltc"
    ),
}


def trained(folder, loader, until):
    """(samples, what dropout keeps on the device) of each step from where the folder's last is."""
    torch.manual_seed(1)
    loader = Resumable(loader)
    manager = CheckpointManager(folder, loader=loader)
    restored = manager.restore_latest()
    step, seen = restored.step if restored else 0, []
    while step < until:
        for (x,) in loader:
            kept = torch.nn.functional.dropout(torch.ones(8, device="ltc"), 0.5).sum()
            seen.append((x.flatten().int().tolist(), kept.item()))
            step += 1
            if step == until:
                manager.save(step)
                break
    return seen


@pytest.mark.parametrize("stop", [2, PASS, 2 * PASS + 1])
@pytest.mark.parametrize("name", [*LOADERS, *STATEFUL])
def test_a_resumed_training_goes_on_with_the_same_samples_and_masks(name, stop, tmp_path):
    make = (LOADERS | STATEFUL)[name]
    torch.manual_seed(2)  # some loaders draw when they are made
    whole = trained(tmp_path / "whole", make(), 3 * PASS + 1)
    torch.manual_seed(2)
    before = trained(tmp_path / "parts", make(), stop)
    behind = trained(tmp_path / "parts", make(), 3 * PASS + 1)
    assert before + behind == whole


class Counted:
    """Batches, and a loader that says how many it has read and goes on where it is told."""

    def __init__(self):
        self.first = self.read = 0

    def __iter__(self):
        for number in range(self.first, PASS):
            self.read += 1
            yield number
        self.first = 0

    def state_dict(self):
        return {"next": self.first + self.read}

    def load_state_dict(self, state):
        self.first = state["next"]


def test_a_loader_with_a_state_of_its_own_reads_nothing_again():
    first = Resumable(Counted())
    batches = iter(first)
    assert [next(batches), next(batches), next(batches)] == [0, 1, 2]

    loader = Counted()
    again = Resumable(loader)
    again.load_state_dict(first.state_dict())
    assert list(again) == [3] and loader.read == 1
    assert again.epoch == 1 and list(again) == [0, 1, 2, 3]


def test_a_checkpoint_of_a_plain_loader_goes_on_in_one_with_a_state():
    first = Resumable(list(range(PASS)))
    next(iter(first))
    again = Resumable(Counted())
    again.load_state_dict(first.state_dict())
    assert list(again) == [1, 2, 3]
    plain = Resumable(list(range(PASS)))
    with_state = Resumable(Counted())
    next(iter(with_state))
    plain.load_state_dict(with_state.state_dict())
    assert list(plain) == [1, 2, 3]


@pytest.mark.parametrize("make", [LOADERS["the loader's"], STATEFUL["a stateful loader's"]])
def test_a_checkpoint_from_between_two_passes_knows_the_generators(make):
    first = Resumable(make())
    list(first)
    state = first.state_dict()
    expected = [x.tolist() for (x,) in first]

    again = Resumable(make())
    again.load_state_dict(state)
    assert [x.tolist() for (x,) in again] == expected


def test_a_checkpoint_without_generators_is_still_read():
    first = Resumable(LOADERS["the loader's"]())
    expected = [x.tolist() for (x,) in first]
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    state.pop("generators", None)  # as ltc wrote it before it kept them

    again = Resumable(LOADERS["the loader's"]())
    again.load_state_dict(state)
    assert [x.tolist() for (x,) in again] == expected[1:]  # its generator is at its first pass
    assert again.epoch == 2


def test_a_generator_that_loader_and_sampler_share_is_one():
    shared = own()
    loader = DataLoader(DATA, shuffle=True, generator=shared)
    assert generators_of(loader) == [shared]
    assert generators_of(DataLoader(DATA, generator=torch.default_generator)) == []
    assert generators_of([1, 2]) == []


@pytest.mark.parametrize("step, error", [(-1, ValueError), ("x", TypeError), (1.5, TypeError)])
def test_a_step_that_names_no_checkpoint_is_refused_before_anything_is_written(
    step, error, tmp_path
):
    manager = CheckpointManager(tmp_path / "folder")
    for call in (manager.save, manager.restore):
        with pytest.raises(error, match=f"^step={step!r}.*the step of a checkpoint must be"):
            call(step)
    assert not (tmp_path / "folder").exists()


def test_a_step_may_be_numpys(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(numpy.int64(3))
    assert manager.steps() == [3] and manager.restore_latest().step == 3


def test_the_warning_of_a_damaged_checkpoint_is_at_the_users_line(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1)
    (tmp_path / "step-00000001.safetensors").write_bytes(b"")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert manager.restore_latest() is None
    assert [warning.filename for warning in told] == [__file__]
