"""A training that was saved and restored goes on bit for bit as if it had never stopped."""

import math
import os
import random
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ltc
import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser
from ltc.checkpointing.resumable import Resumable, random_state, restore_random_state
from ltc.debug import metrics
from ltc.utils.checkpoint import CheckpointManager


class Training:
    """Dropout, batch norm, tied weights, Adam, a schedule and a shuffled loader."""

    def __init__(self, seed=0):
        inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(seed)
        targets = inputs.sum(1, keepdim=True)
        dataset = TensorDataset(inputs, targets)
        self.loader = Resumable(DataLoader(dataset, batch_size=4, shuffle=True))
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1)
        ).to("ltc")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.losses = []

    @property
    def parts(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
        }

    def run(self, until, after_step=lambda step: None):
        """Train until that many steps are done."""
        step = len(self.losses)
        while step < until:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                noise = random.random() + numpy.random.rand()
                loss = nn.functional.mse_loss(self.model(x.to("ltc")), y.to("ltc")) + noise
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                ltm.mark_step()
                self.losses.append(loss.item())
                step += 1
                after_step(step)
                if step == until:
                    break
        return self.losses


def uninterrupted(steps=100):
    random.seed(0), numpy.random.seed(0)
    return Training().run(until=steps)


@pytest.mark.native("the bits of a training that is resumed are compared")
@pytest.mark.parametrize("blocking", [True, False])
def test_losses_after_a_restore_are_bit_equal_and_nothing_is_compiled_again(tmp_path, blocking):
    expected = uninterrupted()
    random.seed(0), numpy.random.seed(0)
    first = Training()
    manager = CheckpointManager(tmp_path, **first.parts)

    def save_at_50(step):
        if step == 50:
            manager.save(step, blocking=blocking)

    assert first.run(until=70, after_step=save_at_50) == expected[:70]
    manager.wait()

    again = Training(seed=1)  # other weights, other order: all of it has to come from the file
    random.seed(5), numpy.random.seed(5)
    restored = CheckpointManager(tmp_path, **again.parts).restore_latest()
    assert restored.step == 50
    again.losses = expected[:50]
    with metrics.counted() as grown:
        assert again.run(until=100) == expected
    assert grown.get("UncachedCompile", 0) == 0


@pytest.mark.native("the bits of a training that is resumed are compared")
def test_a_step_after_the_end_of_a_pass_resumes_too(tmp_path):
    expected = uninterrupted(40)
    for stop in (15, 30):  # a pass has 15 batches
        random.seed(0), numpy.random.seed(0)
        first = Training()
        first.run(until=stop)
        CheckpointManager(tmp_path / str(stop), **first.parts).save(stop)
        again = Training(seed=1)
        CheckpointManager(tmp_path / str(stop), **again.parts).restore_latest()
        again.losses = expected[:stop]
        assert again.run(until=40) == expected


# --- orders -------------------------------------------------------------------------------------


def saved_model(path):
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    xser.save(model.state_dict(), path)
    return path


def make():
    torch.manual_seed(9)
    return nn.Linear(4, 1)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def load_move_optimizer(path):
    model = make()
    model.load_state_dict(xser.load(path))
    model.to("ltc")
    return model, adam(model)


def move_load_optimizer(path):
    model = make().to("ltc")
    model.load_state_dict(xser.load(path))
    return model, adam(model)


def optimizer_move_load(path):
    model = make()
    optimizer = adam(model)
    model.to("ltc")
    model.load_state_dict(xser.load(path, map_location="ltc"))
    return model, optimizer


def load_optimizer_move(path):
    model = make()
    model.load_state_dict(xser.load(path))
    optimizer = adam(model)
    model.to("ltc")
    return model, optimizer


@pytest.mark.native("the bits of a training that is resumed are compared")
@pytest.mark.parametrize(
    "order",
    [
        load_move_optimizer,
        move_load_optimizer,
        optimizer_move_load,
        load_optimizer_move,
    ],
)
def test_every_order_of_load_move_and_optimizer_trains_the_same(order, tmp_path):
    def weights(order):
        model, optimizer = order(saved_model(tmp_path / "model"))
        x = torch.arange(12.0, device="ltc").reshape(3, 4)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            ltm.mark_step()
        return model.weight.tolist()

    trained = weights(order)
    assert trained == weights(load_move_optimizer) and trained != make().weight.tolist()


# --- which checkpoints there are ----------------------------------------------------------------


class Part:
    """Anything with a state."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def saved_steps(folder, metrics_by_step, **options):
    part = Part()
    manager = CheckpointManager(folder, part=part, **options)
    for step, metric in metrics_by_step.items():
        part.value = step * 10
        manager.save(step, metric=metric)
    return manager, part


def test_the_last_few_are_kept(tmp_path):
    manager, _ = saved_steps(tmp_path, dict.fromkeys(range(1, 6)), keep_last=2)
    assert manager.steps() == [4, 5]


@pytest.mark.parametrize("higher, kept", [(False, [2, 3, 6]), (True, [1, 5, 6])])
def test_the_best_few_are_kept_too_also_by_another_process(higher, kept, tmp_path):
    rated = {1: 9.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 7.0}
    options = {"keep_last": 1, "keep_best": 2, "higher_is_better": higher}
    saved_steps(tmp_path, rated, **options)
    manager, _ = saved_steps(tmp_path, {6: 4.0}, **options)
    assert manager.steps() == kept


@pytest.mark.parametrize("higher, kept", [(False, [2, 3, 6]), (True, [3, 5, 6])])
def test_a_metric_that_is_no_number_is_among_no_best(higher, kept, tmp_path):
    rated = {1: math.nan, 2: 1.0, 3: 2.0, 4: math.nan, 5: 7.0, 6: math.nan}
    options = {"keep_last": 1, "keep_best": 2, "higher_is_better": higher}
    assert saved_steps(tmp_path, rated, **options)[0].steps() == kept


def test_a_metric_on_the_device_is_what_it_was_at_the_save(tmp_path):
    manager, metric = CheckpointManager(tmp_path, 1, keep_best=1), torch.ones((), device="ltc")
    for step, value in enumerate([3.0, 1.0, 2.0, 4.0]):
        manager.save(step, metric=metric.fill_(value))
    assert manager.steps() == [1, 3]


def test_a_checkpoint_brings_back_its_step_metric_and_extras(tmp_path):
    part = Part(5)
    CheckpointManager(tmp_path, part=part).save(12, metric=0.5, extra={"note": ("a", 1)})
    part.value = 0
    restored = CheckpointManager(tmp_path, part=part).restore_latest()
    assert (restored.step, restored.metric, restored.extra) == (12, 0.5, {"note": ("a", 1)})
    assert part.value == 5


def test_one_step_can_be_asked_for(tmp_path):
    manager, part = saved_steps(tmp_path, {1: None, 2: None})
    assert manager.restore(1).step == 1 and part.value == 10


def test_without_a_checkpoint_nothing_is_restored(tmp_path):
    assert CheckpointManager(tmp_path / "none", part=Part()).restore_latest() is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-20] + b"x" * 20,
        lambda content: content[:100],
        lambda content: b"",
    ],
)
def test_a_damaged_checkpoint_is_left_out_with_a_warning(damage, tmp_path):
    manager, part = saved_steps(tmp_path, {1: None, 2: None})
    file = tmp_path / "step-00000002.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(UserWarning, match="step 2 is skipped: .*step-00000002"):
        assert manager.restore_latest().step == 1
    assert part.value == 10


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "step-notes.txt").write_text("mine")
    (tmp_path / "step-1.safetensors").write_text("mine")
    saved_steps(tmp_path, dict.fromkeys(range(1, 4)), keep_last=1)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_checkpoint_without_a_part_says_which(tmp_path):
    CheckpointManager(tmp_path, model=Part()).save(1)
    with pytest.raises(KeyError, match="no optimizer.*saved with model"):
        CheckpointManager(tmp_path, model=Part(), optimizer=Part()).restore_latest()


def test_a_part_without_a_state_is_refused(tmp_path):
    with pytest.raises(TypeError, match="step= is a int"):
        CheckpointManager(tmp_path, step=3)


# --- behind the training ------------------------------------------------------------------------


def test_a_save_behind_the_training_has_the_values_of_its_moment(tmp_path):
    model = nn.Sequential(nn.Linear(50, 50), nn.BatchNorm1d(50)).to("ltc")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    manager = CheckpointManager(tmp_path, keep_last=9, model=model)
    expected = []
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 50, device="ltc")).square().mean().backward()
        optimizer.step()
        ltm.mark_step()
        expected.append([t.cpu().clone() for t in model.state_dict().values()])
        manager.save(step, blocking=False)
    manager.wait()
    for step in range(6):
        state = xser.load(tmp_path / f"step-{step:08d}.safetensors")["parts"]["model"]
        assert all(map(torch.equal, state.values(), expected[step]))


def test_a_pending_update_after_the_save_is_not_in_it(tmp_path):
    x = nn.Parameter(torch.zeros(3, device="ltc"))
    cpu = torch.zeros(3)
    manager = CheckpointManager(tmp_path)
    manager.save(1, extra={"x": x.data, "view": x.data[:2], "cpu": cpu}, blocking=False)
    with torch.no_grad():
        x.add_(1)
        cpu.add_(1)
    ltm.mark_step()
    manager.wait()
    extra = manager.restore(1).extra
    assert [t.tolist() for t in extra.values()] == [[0, 0, 0], [0, 0], [0, 0, 0]]
    assert x.tolist() == [1, 1, 1]


def test_an_error_behind_the_training_reaches_the_next_call(tmp_path):
    (tmp_path / "folder").write_text("a file where the folder should be")
    manager = CheckpointManager(tmp_path / "folder", part=Part())
    manager.save(1, blocking=False)
    with pytest.raises(RuntimeError) as caught:
        manager.wait()
    assert isinstance(caught.value.__cause__, OSError)


# --- random numbers -----------------------------------------------------------------------------


def draws():
    on_devices = [torch.rand(3, device=device).tolist() for device in ltc.devices()]
    return [random.random(), numpy.random.rand(), torch.rand(2).tolist(), *on_devices]


def test_every_source_of_random_numbers_goes_on_where_it_was(tmp_path):
    draws()
    xser.save(random_state(), tmp_path / "state")
    expected = draws()
    draws()
    restore_random_state(xser.load(tmp_path / "state"))
    assert draws() == expected


def test_a_manager_on_a_replica_that_does_not_write_returns(tmp_path, monkeypatch):
    monkeypatch.setenv("XRT_SHARD_ORDINAL", "1")
    monkeypatch.setenv("XRT_SHARD_WORLD_SIZE", "2")
    CheckpointManager(tmp_path / "x", part=Part()).save(1)
    assert not os.path.exists(tmp_path / "x")


def test_a_loader_goes_on_behind_the_batch_it_gave_last():
    def loader():
        return Resumable(DataLoader(range(20), batch_size=3, shuffle=True))

    whole = loader()
    torch.manual_seed(4)
    expected = [[batch.tolist() for batch in whole] for _ in range(2)]
    assert whole.epoch == 2

    first = loader()
    torch.manual_seed(4)
    iterator = iter(first)
    given = [next(iterator).tolist() for _ in range(4)]
    state, drawn = first.state_dict(), torch.get_rng_state()

    again = loader()
    again.load_state_dict(state)
    torch.set_rng_state(drawn)
    given += [batch.tolist() for batch in again]
    assert [given, [batch.tolist() for batch in again]] == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert again.epoch == 2


# --- a share for each replica -------------------------------------------------------------------


def as_replica(monkeypatch, ordinal, count):
    monkeypatch.setenv("XRT_SHARD_ORDINAL", str(ordinal))
    monkeypatch.setenv("XRT_SHARD_LOCAL_ORDINAL", str(ordinal))
    monkeypatch.setenv("XRT_SHARD_WORLD_SIZE", str(count))


def sharded(folder, training, **options):
    return CheckpointManager(folder, sharded=True, **options, **training.parts)


def save_shares(folder, training, monkeypatch, step, count, ordinals=None):
    """What `count` replicas do, one after the other; returns what each then draws."""
    drawn = {}
    for ordinal in range(count) if ordinals is None else ordinals:
        as_replica(monkeypatch, ordinal, count)
        torch.manual_seed(100 + ordinal)
        sharded(folder, training).save(step)
        drawn[ordinal] = draws()
    return drawn


@pytest.mark.parametrize("count", [1, 3])
def test_shares_of_some_replicas_load_on_any_number(count, tmp_path, monkeypatch):
    training = Training()
    training.run(until=3)
    drawn = save_shares(tmp_path, training, monkeypatch, 3, count)
    sizes = [f.stat().st_size for f in (tmp_path / "step-00000003").glob("part-*")]
    assert len(sizes) == count
    for ordinal in range(4):
        as_replica(monkeypatch, ordinal, 4)
        again = Training(seed=1)
        torch.manual_seed(7)
        assert sharded(tmp_path, again).restore_latest().step == 3
        expected = training.model.state_dict()
        for name, tensor in again.model.state_dict().items():
            assert torch.equal(tensor.cpu(), expected[name].cpu())
        if ordinal < count:  # a replica that did not save keeps the random state it has
            assert draws() == drawn[ordinal]


def test_shares_are_nearly_equal_and_together_everything(tmp_path, monkeypatch):
    part = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
    for ordinal in range(4):
        as_replica(monkeypatch, ordinal, 4)
        CheckpointManager(tmp_path, sharded=True, model=part).save(1)
    names = [xser.names(file) for file in (tmp_path / "step-00000001").glob("part-*")]
    assert sum(map(len, names)) == len(set().union(*names)) == 16 and {len(n) for n in names} == {4}


def test_the_names_of_shares_are_those_of_all(tmp_path, monkeypatch):
    part = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
    for ordinal in range(3):
        as_replica(monkeypatch, ordinal, 3)
        CheckpointManager(tmp_path, sharded=True, model=part).save(1)
    found = xser.names(tmp_path / "step-00000001")
    assert sorted(found) == sorted(f"parts.model.{name}" for name in part.state_dict())
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(xser.DamagedFile, match="not every replica has saved"):
        xser.names(tmp_path / "step-00000001")


def test_a_checkpoint_without_every_share_is_none(tmp_path, monkeypatch):
    training = Training()
    save_shares(tmp_path, training, monkeypatch, 1, count=2)
    save_shares(tmp_path, training, monkeypatch, 2, count=2, ordinals=[1])
    manager = sharded(tmp_path, Training())
    assert manager.steps() == [1] and manager.restore_latest().step == 1


def test_shares_of_different_saves_are_never_mixed(tmp_path, monkeypatch):
    training = Training()
    save_shares(tmp_path, training, monkeypatch, 1, count=2)
    save_shares(tmp_path, training, monkeypatch, 2, count=2)
    training.run(until=1)
    file = "part-00000-of-00002.safetensors"
    as_replica(monkeypatch, 0, 2)
    sharded(tmp_path / "other", training).save(2)
    (tmp_path / "other" / "step-00000002" / file).rename(tmp_path / "step-00000002" / file)
    with pytest.warns(UserWarning, match=f"step 2 is skipped: .*{file} belongs to another save"):
        assert sharded(tmp_path, training).restore_latest().step == 1


@pytest.mark.parametrize("first", [True, False], ids=["shares first", "file first"])
def test_a_save_of_the_other_kind_replaces_that_of_the_same_step(first, tmp_path):
    part = Part()
    for kind in (first, not first):
        manager = CheckpointManager(tmp_path, sharded=kind, part=part)
        part.value += 1
        manager.save(7)
    part.value = 0
    assert manager.restore(7).step == 7 and part.value == 2
    assert manager.steps() == [7] and len(list(tmp_path.iterdir())) == 1


def test_a_manifest_that_points_elsewhere_is_refused(tmp_path, monkeypatch):
    save_shares(tmp_path, Training(), monkeypatch, 1, count=1)
    folder = tmp_path / "step-00000001"
    for text in ('{"parts": {"../../x": "0"}}', "[", '{"parts": {"part-9": "0"}}', "{}"):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(xser.DamagedFile, match="manifest.json"):
            xser.load(folder)


def test_shares_that_were_never_complete_go_with_the_old_checkpoints(tmp_path, monkeypatch):
    training = Training()
    save_shares(tmp_path, training, monkeypatch, 1, count=2, ordinals=[1])
    for ordinal in (0, 1):
        as_replica(monkeypatch, ordinal, 2)
        manager = sharded(tmp_path, training, keep_last=1)
        manager.save(2)
        manager.save(3)
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000003"]
