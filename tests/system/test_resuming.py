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
@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_training_goes_on_with_the_same_samples_and_masks(name, stop, tmp_path):
    whole = trained(tmp_path / "whole", LOADERS[name](), 3 * PASS + 1)
    before = trained(tmp_path / "parts", LOADERS[name](), stop)
    behind = trained(tmp_path / "parts", LOADERS[name](), 3 * PASS + 1)
    assert before + behind == whole


def test_a_checkpoint_from_between_two_passes_knows_the_generators():
    first = Resumable(LOADERS["the loader's"]())
    list(first)
    state = first.state_dict()
    expected = [x.tolist() for (x,) in first]

    again = Resumable(LOADERS["the loader's"]())
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
