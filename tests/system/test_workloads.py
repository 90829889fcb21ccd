"""The six workloads of scripts/bench/workloads.py: what a steady step does beside its one native call."""

import subprocess
import sys
from pathlib import Path

import pytest

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.llvm.native.kernel_run import KernelRun

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"
sys.path.insert(0, str(SCRIPTS))
import workloads

pytestmark = pytest.mark.skipif(
    config.value("LTC_BACKEND") != "llvm", reason="what the LLVM backend promises"
)


@pytest.fixture
def native_calls(monkeypatch) -> list[int]:
    """One element for every run of kernels that native code is given."""
    calls: list[int] = []
    launch = KernelRun.launch

    def counted(run, frame):
        calls.append(frame)
        return launch(run, frame)

    monkeypatch.setattr(KernelRun, "launch", counted)
    return calls


@pytest.mark.native("native calls are those of compiled programs")
@pytest.mark.parametrize("name", workloads.OPEN)
def test_a_steady_step_is_one_native_call_and_no_step_needs_python(name, native_calls):
    with metrics.counted() as ever:
        step = getattr(workloads, name)(ltm.lazy_device(), workloads.Way(mark=ltm.mark_step))
        for _ in range(3):  # the first step sees no gradients and no momentum
            step()
        ltm.wait_device_ops()
    native_calls.clear()
    with metrics.counted() as steady:
        step()
        ltm.wait_device_ops()
    assert len(native_calls) == 1
    assert steady["RecalledPrograms"] == steady["NewPrograms"] == steady["llvm.compiled"] == 0
    assert steady["RecordedEntries"] == steady["MetaInference"] == 0
    for grown in (ever, steady):
        assert [n for n in grown if n.startswith(("aten::", "torchvision::", "extern."))] == []


@pytest.mark.native("native calls are those of compiled programs")
@pytest.mark.parametrize("name", ["mlp", "black_scholes"])
def test_a_profile_lists_the_kernels_of_a_step(name):
    ended = subprocess.run(
        [sys.executable, SCRIPTS / "profile_program.py", name, "--rounds", "1"],
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert " ms in " in ended.stdout and "tasks  kernel" in ended.stdout


def test_the_bench_of_kernels_sees_the_programs_that_run():
    command = [sys.executable, SCRIPTS / "bench.py", "--kernels", "--only", "sum", "--rounds", "1"]
    ended = subprocess.run(
        [*command, "--systems", "ltc program"], capture_output=True, text=True, timeout=1200
    )
    assert ended.returncode == 0 and "failed" not in ended.stdout, ended.stdout + ended.stderr
