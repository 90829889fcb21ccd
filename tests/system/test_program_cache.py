"""Programs that outlive their process: found again without tracing or compiling anything."""

import gc
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.llvm.native.kernel_cache import _loaded
from ltc.runtime.program_cache import PROGRAMS
from ltc.support.disk_cache import disk_cache

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "stress"))
from damage_cache import files, trained

pytestmark = [
    pytest.mark.native("what is on the disk are compiled programs"),
    pytest.mark.skipif(
        config.value("LTC_BACKEND") != "llvm", reason="only the LLVM backend keeps programs"
    ),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    forget()
    with config.override(LTC_CACHE_DIR=str(tmp_path / "cache")):
        yield tmp_path / "cache"
    forget()


def forget() -> None:
    """As in a new process: no program, no kernel."""
    PROGRAMS.clear()
    gc.collect()


def counted(work, *names: str) -> list[int]:
    before = [metrics.counter_value(name) or 0 for name in names]
    work()
    ltm.wait_device_ops()
    return [(metrics.counter_value(n) or 0) - b for n, b in zip(names, before)]


def test_a_second_run_compiles_nothing_and_gives_the_same_bits():
    losses = []
    assert counted(lambda: losses.append(trained()), "llvm.compiled")[0] > 0
    forget()
    counts = counted(
        lambda: losses.append(trained()), "llvm.compiled", "NewPrograms", "RecalledPrograms"
    )
    assert counts[:2] == [0, 0] and counts[2] > 0
    assert losses[0] == losses[1]


def test_kernels_go_with_the_last_program_that_uses_them():
    trained()
    assert len(_loaded) > 0
    ltm.wait_device_ops()
    before = len(_loaded)
    x = torch.ones(7, 13, device="ltc")
    (x * 3 + x.sum(0)).sum().item()
    del x
    assert len(_loaded) > before


def test_damaged_files_are_compiled_anew_with_one_warning(own_cache):
    first = trained()
    for path in own_cache.iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    forget()
    with pytest.warns(UserWarning, match="damaged") as told:
        assert trained() == first
    assert sum("damaged" in str(one.message) for one in told) == 1
    forget()
    assert counted(trained, "llvm.compiled") == [0]


def exchanged(folder: Path) -> None:
    """Every file gets the name of the next one."""
    paths = files(folder)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1]):
        path.write_bytes(content)


OTHER_CONTENT = (
    b"", b"no machine code", b"{}", b"[[]]", b"null", b"\x7fELF\x02\x01" + bytes(58), b"\xff\xfe",
)  # fmt: skip


def of_other_content(first: int):
    """Every file of another content than the one before."""

    def written(folder: Path) -> None:
        for number, path in enumerate(files(folder), first):
            disk_cache().write(path.name, OTHER_CONTENT[number % len(OTHER_CONTENT)])

    return written


@pytest.mark.parametrize("damage", [exchanged, *map(of_other_content, (0, 2, 5))])
def test_files_that_hold_something_else_are_made_anew_with_one_warning(own_cache, damage):
    """Whole files under a wrong name; and whole files that no writer of theirs has written."""
    first = trained()
    damage(own_cache)
    forget()
    with pytest.warns(UserWarning, match="damaged") as told:
        assert trained() == first
    assert sum("damaged" in str(one.message) for one in told) == 1
    forget()
    assert counted(trained, "llvm.compiled") == [0]


def test_a_record_without_its_kernels_is_compiled_anew(own_cache):
    first = trained()
    largest = max(own_cache.iterdir(), key=lambda path: path.stat().st_size)
    largest.unlink()
    forget()
    assert trained() == first


def test_without_a_cache_nothing_is_written(own_cache):
    with config.override(LTC_CACHE=0):
        trained()
    assert not own_cache.exists()


def test_a_disk_that_takes_nothing_is_no_hindrance(own_cache):
    own_cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be made") as told:
        first = trained()
    assert sum("ltc's cache" in str(one.message) for one in told) == 1
    with config.override(LTC_CACHE=0):
        forget()
        assert trained() == first


def test_an_error_of_a_recalled_program_names_the_line():
    def run(index: int) -> torch.Tensor:
        x, at = torch.arange(5.0).to("ltc"), torch.tensor([index]).to("ltc")
        return torch.index_select(x * 2, 0, at).cpu()

    assert run(3).item() == 6
    forget()
    assert run(2).item() == 4
    with pytest.raises((IndexError, RuntimeError)) as raised:
        run(9)
    assert any("test_program_cache.py" in note for note in raised.value.__notes__)


def test_another_setting_is_another_program():
    first = counted(trained, "NewPrograms")[0]
    forget()
    with config.override(LTC_USE_BF16=1):
        assert counted(trained, "RecalledPrograms")[0] == 0
    forget()
    assert counted(trained, "RecalledPrograms")[0] == first


def attending(layers: int) -> None:
    """Two steps of so many equal transformer blocks."""
    nn = torch.nn
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(block, layers, enable_nested_tensor=False).to("ltc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 7, 16, device="ltc")).square().mean().backward()
        optimizer.step()
        ltm.mark_step()


@pytest.mark.parametrize("train", [trained, attending])
def test_ten_times_as_many_equal_layers_compile_half_as_many_kernels_more(train):
    few = counted(lambda: train(layers=2), "llvm.compiled")[0]
    forget()
    assert 0 <= counted(lambda: train(layers=20), "llvm.compiled")[0] <= few // 2


def test_one_more_relu_compiles_at_most_three_kernels():
    trained()
    assert counted(lambda: trained(extra=[torch.nn.ReLU()]), "llvm.compiled")[0] <= 3


def perceptron() -> torch.nn.Module:
    linear = torch.nn.Linear
    return torch.nn.Sequential(
        torch.nn.Flatten(), linear(144, 64), torch.nn.ReLU(), linear(64, 32), torch.nn.ReLU(),
        linear(32, 10),
    )  # fmt: skip


def convolutions() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


@pytest.mark.parametrize("build", [perceptron, convolutions])
def test_twenty_batch_sizes_compile_few_more_kernels_than_one(build):
    torch.manual_seed(0)
    model = build().to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: int) -> None:
        x, y = torch.randn(batch, 1, 12, 12).to("ltc"), torch.randint(10, (batch,)).to("ltc")
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        ltm.mark_step()

    def first_steps() -> None:
        for _ in range(3):  # the first has no momentum to read
            step(64)

    of_one = counted(first_steps, "llvm.compiled")[0]
    of_others = counted(lambda: [step(b) for b in range(32, 128, 5)], "llvm.compiled")[0]
    assert of_one + of_others <= 1.5 * of_one


STEP = """
import sys, warnings
warnings.simplefilter("error")
import torch, ltc
import ltc.core.lazy_model as ltm
from ltc.debug import metrics
from ltc.runtime import program
program.SHORT_SECONDS = float(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
model = model.to("ltc")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 32).to("ltc")).square().mean()
    loss.backward()
    optimizer.step()
    ltm.mark_step()
print(loss.item().hex(), metrics.counter_value("llvm.compiled") or 0, bool(COMPILER & set(sys.modules)))
"""
COMPILER = {"llvmlite", "ltc.backends.llvm.schedule", "ltc.llvm.ops.dispatch"}


QUEUED, AT_ONCE = "-1", "inf"  # which programs are short: none, or all


def processes(count: int, short: str = QUEUED) -> list[list[str]]:
    """What that many processes print that start together."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", f"{COMPILER = }\n{STEP}", short], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, text=True,
        )
        for _ in range(count)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=1200) for process in started]
    assert all(process.returncode == 0 for process in started), outputs
    return [out.split() for out, _ in outputs]


def test_processes_that_start_cold_together_agree_and_the_next_compiles_nothing():
    together = processes(4)
    (after,) = processes(1)
    assert after[1] == "0"
    assert {loss for loss, *_ in together} == {after[0]}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere LLVM loads the kernels")
@pytest.mark.parametrize("short", [QUEUED, AT_ONCE])
def test_a_process_that_compiles_nothing_imports_no_compiler(short):
    (first,), (second,) = processes(1, short), processes(1, short)
    assert [first[2], second[2]] == ["True", "False"]


FIRST_STEPS = """
import sys
import torch, ltc
import ltc.core.lazy_model as ltm
from ltc.runtime import program
program.SHORT_SECONDS = float(sys.argv[1])
x = torch.ones(4, device="ltc")
for _ in range(2):
    x = (x * 2).tanh()
    ltm.mark_step(wait=True)
print(bool(COMPILER & set(sys.modules)))
"""


STEPS_OF_ALL_SIZES = """
import sys, time
import torch, ltc
import ltc.core.lazy_model as ltm
from ltc.debug import metrics
from ltc.runtime import program
from ltc.runtime.background import compile_behind
program.SHORT_SECONDS = float(sys.argv[1])
def steps(sizes):
    for rows in sizes:
        x = (torch.ones(rows, 7).to("ltc") * 2).tanh()
        ltm.mark_step(wait=True)
steps(range(20, 26))
while compile_behind._worker._requests:
    time.sleep(0.01)
steps(range(26, 29))
print(bool(COMPILER & set(sys.modules)))
assert metrics.counter_value("SymbolicPrograms") == 1
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere LLVM is asked for its name")
@pytest.mark.parametrize("short", [QUEUED, AT_ONCE])
@pytest.mark.parametrize("script", [FIRST_STEPS, STEPS_OF_ALL_SIZES])
def test_the_first_steps_on_a_machine_wait_for_no_llvm(script, short, tmp_path):
    alone = {"LTC_TIER": "auto", "LTC_NUM_DEVICES": "1", "LTC_CACHE_DIR": str(tmp_path)}
    alone["LTC_NATIVE"] = "0"  # with the core, so small a step is worth no program
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **alone}
    command = [sys.executable, "-c", f"{COMPILER = }\n{script}", short]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_child_of_fork_uses_the_programs_of_its_parent():
    expected = trained()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's threads are not running here
        child = os.fork()
    if not child:
        ok = counted(lambda: trained(), "llvm.compiled") == [0]
        os.write(writer, b"1" if ok and trained() == expected else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
