"""The six workloads of scripts/workloads.py: what a steady step does beside its one native call."""

import sys
from pathlib import Path

import pytest

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.llvm.program import KernelRun

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import workloads  # noqa: E402

pytestmark = pytest.mark.skipif(
    config.value("LTC_BACKEND") != "llvm", reason="what the LLVM backend promises"
)


@pytest.fixture
def native_calls(monkeypatch) -> list[int]:
    """One element for every call of native code that runs kernels."""
    calls, launch = [], KernelRun.launch

    def counted(run: KernelRun, frame: int) -> int:
        calls.append(frame)
        return launch(run, frame)

    monkeypatch.setattr(KernelRun, "launch", counted)
    return calls


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
