"""LTC_USE_BF16 and LTC_DOWNCAST_BF16, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ltc import config
from ltc.runtime import physical_dtype

CASES = Path(__file__).parent / "physical_dtype_cases.py"
MODES = ["LTC_USE_BF16", "LTC_DOWNCAST_BF16"]


def run(*command: str, **settings: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.mark.parametrize("backend", ["eager", "llvm"])
@pytest.mark.parametrize("mode", MODES)
def test_every_case_holds(mode, backend):
    done = run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(CASES),
        **{mode: "1", "LTC_BACKEND": backend, "LTC_CHECK": "1"},
    )
    assert done.returncode == 0, done.stdout[-5000:]


def test_one_line_says_what_is_converted():
    code = "import torch, ltc; [torch.ones(2, device='ltc').sum().item() for _ in range(3)]"
    lines = run("-c", code, LTC_USE_BF16="1").stderr.splitlines()
    assert len([line for line in lines if "float64 as bfloat16" in line]) == 1, lines
    assert "kept" not in run("-c", code).stderr


def test_both_variables_contradict_each_other():
    code = "import torch, ltc; torch.ones(2, device='ltc').sum().item()"
    done = run("-c", code, LTC_USE_BF16="1", LTC_DOWNCAST_BF16="1")
    assert "LTC_USE_BF16 and LTC_DOWNCAST_BF16 contradict each other" in done.stderr


REPLICAS = """
import sys, torch, ltc.core.lazy_model as ltm, ltc.distributed.lazy_multiprocessing as lmp

def replica(index):
    x = torch.tensor([1.0, 257.0 / 256]) * (1 + 2 ** -8 * index)
    mine = x.to("ltc")
    total = ltm.all_reduce("sum", mine)
    joined = ltm.all_gather(mine)
    ltm.mark_step()
    rows = [(x * (1 + 2 ** -8 * i)).bfloat16().float() for x in [torch.tensor([1.0, 257 / 256])]
            for i in range(2)]
    assert torch.equal(joined.cpu(), torch.cat(rows)), joined
    assert torch.equal(total.cpu(), sum(rows).bfloat16().float()), total

if __name__ == "__main__":
    lmp.spawn(replica, nprocs=2)
    print("exchanged")
"""


def test_replicas_exchange_what_they_keep(tmp_path):
    script = tmp_path / "replicas.py"
    script.write_text(REPLICAS)
    done = run(str(script), LTC_USE_BF16="1")
    assert done.stdout.endswith("exchanged\n"), done.stderr[-3000:]


def test_without_a_variable_nothing_is_converted():
    assert (
        not config.value("LTC_USE_BF16")
        and physical_dtype.kept_as() == {}
        and physical_dtype.mode() == ""
    )
