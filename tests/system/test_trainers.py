"""accelerate, Trainer, Lightning and Ray train on ltc as on the CPU, and resume equal."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ltc import config
from ltc.debug import metrics
from tests import trainers

ROOT = Path(__file__).parents[2]
CLOSE = 1e-4
NARROW = 5e-3  # what rounding to bfloat16, in another order of adding, makes of a loss
WHOLLY_NARROW = 2**-6  # two units in the last place of losses that are bfloat16 themselves
TOLERANCE = {"32-true": CLOSE, "bf16-true": WHOLLY_NARROW}


@pytest.fixture
def compiled_first():
    """Resumed steps have the same bits only on the same tier."""
    with config.override(LTC_TIER="native"):
        yield


# --- accelerate -------------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch):
    """Makes an Accelerator of a device."""
    accelerate = trainers.needs("accelerate")

    def make(device: str, **options):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        loading = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
        return accelerate.Accelerator(
            gradient_accumulation_steps=2, dataloader_config=loading, **options
        )

    yield make
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def trained(accelerator, dropout=0.0, folder=None, first=0) -> tuple:
    """Losses and parameters of eight batches; the state goes to the folder after four."""
    torch.manual_seed(0)
    model = trainers.perceptron(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = trainers.batches(shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if first:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, first)
    losses = []
    for number, (x, y) in enumerate(loader, first + 1):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if folder and number == 4 and not first:
            accelerator.save_state(folder)
    parameters = [p.detach().cpu() for p in model.parameters()]
    accelerator.free_memory()
    return losses, parameters, x.device.type


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerate_trains_as_on_the_cpu(accelerator, precision):
    mixed = "no" if precision == "fp16" else precision  # the CPU has no scaled losses
    expected = trained(accelerator("cpu", mixed_precision=mixed))
    found = accelerator("ltc", mixed_precision=precision)
    losses, _, device = trained(found)

    assert device == "ltc"
    assert (found.scaler is not None) == (precision == "fp16")
    assert losses == pytest.approx(expected[0], abs=CLOSE if precision == "no" else NARROW)


def test_accelerate_resumes_with_the_same_draws(compiled_first, accelerator, tmp_path):
    losses, parameters, _ = trained(accelerator("ltc"), 0.3, str(tmp_path))
    resumed, again, _ = trained(accelerator("ltc"), 0.3, str(tmp_path), first=4)

    assert resumed == losses[4:]
    assert all(map(torch.equal, parameters, again))


SCRIPT = """
import torch
import ltc
from accelerate import Accelerator
from tests import trainers
accelerator = Accelerator()
model = trainers.perceptron()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = accelerator.prepare(model, optimizer, trainers.batches())
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
loss = accelerator.gather(torch.nn.functional.cross_entropy(model(x), y).detach()[None]).mean()
accelerator.print("ranks", accelerator.num_processes, x.device.type, f"{loss.item():.4f}")
accelerator.end_training()
"""


def in_processes(launcher: list[str], tmp_path, script: str, **variables) -> list[str]:
    """The words of the line about ranks that a script prints, started by that launcher."""
    path = tmp_path / "script.py"
    path.write_text("from tests import trainers\ntrainers.prepare_torchvision()\n" + script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LTC_CHECK": "0", **variables}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, str(path)],
        env=environment | {"LTC_NUM_DEVICES": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("ranks")]
    assert lines, run.stdout + run.stderr
    return lines[0].split()[1:]


def loss_of_two_ranks() -> float:
    """The last loss of SCRIPT: each step averages two batches."""
    model = trainers.perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows = list(trainers.batches())
    for first, second in zip(rows[::2], rows[1::2]):
        optimizer.zero_grad()
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in (first, second)]
        (sum(losses) / 2).backward()
        optimizer.step()
    with torch.no_grad():
        last = [nn.functional.cross_entropy(model(x), y) for x, y in (first, second)]
    return (sum(last) / 2).item()


def test_accelerate_launch_starts_two_that_train_together(tmp_path):
    trainers.needs("accelerate")
    launch = "import sys, ltc, accelerate.commands.launch as l; sys.argv[0] = 'launch'; l.main()"
    options = ["--num_processes", "2", "--main_process_port", "0"]

    found = in_processes(["-c", launch, *options], tmp_path, SCRIPT, ACCELERATE_TORCH_DEVICE="ltc")

    assert found[:2] == ["2", "ltc"]
    assert float(found[2]) == pytest.approx(loss_of_two_ranks(), abs=CLOSE)


def test_the_variable_alone_is_enough_where_ltc_is_installed(tmp_path, installed):
    trainers.needs("accelerate")
    launch = (
        "import sys; from tests import trainers; trainers.prepare_torchvision();"
        "import accelerate.commands.launch as l; sys.argv[0] = 'launch'; l.main()"
    )
    options = ["--num_processes", "2", "--main_process_port", "0"]
    script = SCRIPT.replace("import ltc\n", "")
    variables = {"ACCELERATE_TORCH_DEVICE": "ltc", "PYTHONPATH": installed}

    found = in_processes(["-c", launch, *options], tmp_path, script, **variables)

    assert found[:2] == ["2", "ltc"]
    assert float(found[2]) == pytest.approx(loss_of_two_ranks(), abs=CLOSE)


# --- transformers' Trainer --------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = trainers.words(16, 8)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """Makes a Trainer of a device."""
    trainers.needs("accelerate")
    transformers = trainers.needs("transformers")

    def make(device: str, dropout: float = 0.0, **options):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / device), per_device_train_batch_size=4, max_steps=4,
            learning_rate=1e-2, logging_steps=1, save_steps=2, eval_strategy="steps", eval_steps=2,
            gradient_accumulation_steps=2, max_grad_norm=0.5, report_to=[], disable_tqdm=True,
            seed=3, **options,
        )  # fmt: skip
        model = trainers.language_model(attention_dropout=dropout)
        return transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())

    return make


def told(trainer) -> list[float]:
    """The losses of training and of evaluation, as they were logged."""
    history = trainer.state.log_history
    return [row[name] for row in history for name in ("loss", "eval_loss") if name in row]


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_trainer_trains_and_evaluates_as_on_the_cpu(trainer, precision):
    cpu = trainer("cpu", use_cpu=True, **precision)
    cpu.train()
    lazy = trainer("ltc", **precision)
    lazy.train()

    assert next(lazy.model.parameters()).is_ltc
    assert told(lazy) == pytest.approx(told(cpu), abs=NARROW if precision else CLOSE)


UNUSED = """
import sys
import torch
import ltc
from tests import trainers
from transformers import Trainer, TrainingArguments


class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.unused = trainers.language_model(), torch.nn.Linear(4, 4)

    def forward(self, input_ids, labels):
        return self.model(input_ids, labels=labels)


rows = [{"input_ids": row, "labels": row} for row in trainers.words(16, 8)]
arguments = TrainingArguments(
    output_dir="made", per_device_train_batch_size=2, max_steps=5, learning_rate=1e-2, seed=3,
    logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=USE_CPU,
)
trainer = Trainer(Half(), arguments, train_dataset=rows)
trainer.train()
assert trainer.model_wrapped.find_unused_parameters
losses = [f"{row['loss']:.5f}" for row in trainer.state.log_history if "loss" in row]
if arguments.process_index == 0:
    print("ranks", arguments.world_size, *losses)
"""


def test_trainer_of_two_processes_finds_parameters_that_take_no_part(tmp_path):
    """transformers asks DistributedDataParallel for that by default."""
    trainers.needs("accelerate")
    trainers.needs("transformers")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    cpu, lazy = (
        in_processes(
            launcher,
            tmp_path,
            UNUSED.replace("USE_CPU", str(kind == "cpu")),
            ACCELERATE_TORCH_DEVICE=kind,
        )
        for kind in ("cpu", "ltc")
    )
    assert cpu[0] == lazy[0] == "2" and len(lazy) == 6
    assert [float(x) for x in lazy] == pytest.approx([float(x) for x in cpu], abs=CLOSE)


def test_trainer_resumes_with_the_same_draws(trainer, tmp_path):
    whole, rest = trainer("ltc", 0.3), trainer("ltc", 0.3)
    whole.train()
    rest.train(resume_from_checkpoint=str(tmp_path / "ltc" / "checkpoint-2"))

    assert told(rest) == pytest.approx(told(whole), abs=1e-6)
    assert all(
        torch.allclose(p.cpu(), q.cpu(), atol=1e-6)
        for p, q in zip(whole.model.parameters(), rest.model.parameters())
    )


def test_trainer_reads_nothing_of_a_step_that_it_does_not_log(trainer):
    one = trainer("ltc")
    one.args.logging_steps, one.args.eval_strategy, one.args.save_strategy = 100, "no", "no"
    with metrics.counted() as grown:
        one.train()

    # of 4 steps of 2 batches: transformers looks at each batch's positions, and at the total
    assert grown["aten::_local_scalar_dense"] <= 8 + 2


def test_trainer_logs_the_mean_in_place_of_what_is_not_finite(trainer):
    one = trainer("ltc", fp16=True)
    original = one.compute_loss
    one.compute_loss = lambda *args, **kwargs: original(*args, **kwargs) * float("inf")
    one.args.eval_strategy = one.args.save_strategy = "no"
    one.train()

    assert told(one)[0] == 0.0
    assert one.args.logging_nan_inf_filter


# --- Lightning --------------------------------------------------------------------------------


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def lightning(request):
    module = trainers.needs(request.param)
    importlib.import_module("ltc.integrations.lightning")
    return module


def lightning_module(lightning, dropout: float = 0.0):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = trainers.perceptron(dropout), []

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch, index):
            self.log("validation", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def lightning_trainer(lightning, folder, **options):
    return lightning.Trainer(
        devices=1, max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, gradient_clip_val=0.5,
        num_sanity_val_steps=0, **options,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_lightning_trains_as_on_the_cpu(lightning, precision, tmp_path):
    found = []
    for device in ("cpu", "ltc"):
        kind = "32-true" if precision == "16-mixed" and device == "cpu" else precision
        module = lightning_module(lightning)
        trainer = lightning_trainer(
            lightning, tmp_path, accelerator=device, precision=kind, enable_checkpointing=False
        )
        with metrics.counted() as grown:
            trainer.fit(module, trainers.batches(), trainers.batches())
        assert grown["DefaultDtypeFlush"] == 0
        found.append(
            [x.item() for x in module.losses] + [trainer.callback_metrics["validation"].item()]
        )

    assert module.losses[0].is_ltc
    assert found[1] == pytest.approx(found[0], abs=TOLERANCE.get(precision, NARROW))


def test_lightning_resumes_equal(compiled_first, lightning, tmp_path):
    callbacks = importlib.import_module(f"{trainers_package(lightning)}.callbacks")
    modules = [lightning_module(lightning) for _ in range(2)]
    for module, checkpoint in zip(modules, (None, tmp_path / "epoch=0.ckpt")):
        saving = callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        stopping = callbacks.EarlyStopping("loss", patience=99)
        trainer = lightning_trainer(
            lightning, tmp_path, accelerator="ltc", callbacks=[saving, stopping]
        )
        trainer.fit(module, trainers.batches(), ckpt_path=checkpoint)

    assert len(modules[1].losses) == 8
    assert all(map(torch.equal, *[[p.cpu() for p in m.parameters()] for m in modules]))


def trainers_package(lightning) -> str:
    return "lightning.pytorch" if lightning.__name__ == "lightning" else lightning.__name__


FABRIC = """
import torch
import ltc.integrations.lightning
from lightning import Fabric
from tests import trainers
fabric = Fabric(accelerator="ltc", devices=2)
fabric.launch()
model = trainers.perceptron()
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
for x, y in fabric.setup_dataloaders(trainers.batches()):
    optimizer.zero_grad()
    fabric.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
same = fabric.all_gather(next(model.parameters()))
if fabric.global_rank == 0:
    print("ranks", fabric.world_size, x.device.type, torch.equal(same[0], same[1]))
"""


def test_fabric_trains_in_two_processes(tmp_path):
    trainers.needs("lightning")

    assert in_processes([], tmp_path, FABRIC) == ["2", "ltc", "True"]


TRAINER = """
import os
import lightning
import torch
import ltc.integrations.lightning
from tests import trainers

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = trainers.perceptron()

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

module = Module()
trainer = lightning.Trainer(
    accelerator=os.environ["DEVICE"], devices=2, max_epochs=int(os.environ["EPOCHS"]),
    strategy="ddp", logger=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, trainers.batches(shuffle=True), ckpt_path=os.environ.get("RESUMED"))
trainer.save_checkpoint(os.environ["SAVED"])
with open(os.environ["SAVED"] + str(trainer.global_rank), "w") as file:
    print(*(float(x).hex() for p in module.parameters() for x in p.detach().cpu().flatten()), file=file)
if trainer.global_rank == 0:
    print("ranks", trainer.world_size, trainer.strategy.root_device.type)
"""


def by_two_processes(device: str, epochs: int, folder: Path, name: str, **variables) -> list[float]:
    """The parameters after so many epochs of Lightning's Trainer, which both ranks have alike."""
    saved = folder / name
    told = in_processes(
        [], folder, TRAINER, DEVICE=device, EPOCHS=str(epochs), SAVED=str(saved), **variables
    )
    assert told == ["2", device]
    first, second = (Path(f"{saved}{rank}").read_text() for rank in range(2))
    assert first == second
    return [float.fromhex(word) for word in first.split()]


def test_lightning_trains_and_resumes_in_two_processes(tmp_path):
    trainers.needs("lightning")
    whole = by_two_processes("ltc", 2, tmp_path, "whole", LTC_TIER="native")
    by_two_processes("ltc", 1, tmp_path, "half", LTC_TIER="native")
    resumed = {"RESUMED": str(tmp_path / "half"), "LTC_TIER": "native"}

    assert by_two_processes("ltc", 2, tmp_path, "resumed", **resumed) == whole
    assert whole == pytest.approx(by_two_processes("cpu", 2, tmp_path, "cpu"), abs=CLOSE)


# --- Ray Train --------------------------------------------------------------------------------


def by_ray(device: str, steps: int, storage: Path) -> float:
    """The loss of the last step of examples/ray_train.py, whose two workers train together."""
    options = ["--device", device, "--steps", str(steps), "--storage", str(storage)]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / "ray_train.py"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    (told,) = [line for line in run.stdout.splitlines() if line.startswith("step ")] or [run.stderr]
    assert told.startswith(f"step {steps - 1}: loss "), told
    return float(told.rpartition(" ")[2])


def test_workers_of_ray_train_and_resume_as_on_the_cpu(tmp_path):
    trainers.needs("ray")
    trainers.needs("ray.train")
    by_ray("ltc", 2, tmp_path / "ltc")
    resumed = by_ray("ltc", 4, tmp_path / "ltc")
    assert resumed == pytest.approx(by_ray("cpu", 4, tmp_path / "cpu"), abs=CLOSE)
