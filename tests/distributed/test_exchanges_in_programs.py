"""LTC_BACKEND=xla: exchanges of four replicas are part of one program that their devices run together.

The same script runs on llvm, whose results, and whose errors, it must have.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("jax", reason="JAX is not installed")
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "replica_threads.py"


@functools.cache
def outcome(case: str, backend: str, devices: int = 4, of_jax: int = 4, processes: int = 1) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, case, str(processes)],
        capture_output=True, text=True, cwd=ROOT,
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "LTC_BACKEND": backend, "LTC_NUM_DEVICES": str(devices),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={of_jax}", "JAX_PLATFORMS": "cpu",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # gloo has said something before


def assert_equal(ours: dict, theirs: dict) -> None:
    assert (ours["error"], theirs["error"]) == (None, None)
    for mine, other in zip(ours["results"], theirs["results"], strict=True):
        for x, y in zip(mine, other, strict=True):
            given = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
            torch.testing.assert_close(*given, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("case", ["kinds", "dtypes", "training"])
def test_nothing_is_exchanged_by_the_host(case):
    found = outcome(case, "xla")
    assert_equal(found, outcome(case, "llvm"))
    assert found["host"] == []
    assert list(found["counted"]) == ["UncachedCompile"]


@pytest.mark.parametrize("case", ["one_reads", "one_reads_between_scales", "one_sends"])
def test_a_replica_whose_programs_differ_sends_all_exchanges_over_the_host(case):
    found = outcome(case, "xla")
    assert_equal(found, outcome(case, "llvm"))
    assert found["counted"]["ReplicasOverHost"] == 4
    assert "all_reduce" in found["host"]
    assert set(found["host"]) <= {"all_reduce", "send", "receive"}


def test_another_exchange_is_found_before_a_program_of_it_is_compiled():
    found = outcome("one_adds_otherwise", "xla")
    assert "CutOut::collective_start" not in found["counted"]
    assert found["host"] == []


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("one_adds_otherwise", "Replicas do not run the same collectives"),
        ("one_raises", "no more of this"),
        ("one_has_a_wrong_index", "index 9 is out of bounds"),
    ],
)
def test_replicas_that_fail_are_told_as_on_llvm(case, words):
    ours, theirs = outcome(case, "xla")["error"], outcome(case, "llvm")["error"]
    assert words in ours
    assert words in theirs


def test_replicas_that_share_a_device_of_jaxs_exchange_over_the_host():
    found = outcome("kinds", "xla", of_jax=2)
    assert_equal(found, outcome("kinds", "llvm"))
    assert found["counted"]["CutOut::collective_start"]
    assert len(found["host"]) > 4


def test_a_process_has_the_devices_that_jax_finds_where_their_number_is_0():
    assert_equal(outcome("training", "xla", devices=0), outcome("training", "xla"))


def test_a_known_program_starts_while_another_thread_compiles():
    found = outcome("beside_a_compilation", "xla")
    assert found["results"] == [[[4.0, 8.0], [1.0]]] * 4


# --- two processes of two devices ----------------------------------------------------------------

BY_TWO = {"devices": 2, "of_jax": 2, "processes": 2}


@pytest.mark.parametrize("case", ["kinds", "training"])
def test_processes_exchange_in_their_programs(case):
    found = outcome(case, "xla", **BY_TWO)
    assert_equal(found, outcome(case, "llvm", devices=2, processes=2))
    assert found["host"] == []
    assert list(found["counted"]) == ["UncachedCompile"]


def test_a_replica_of_another_process_whose_programs_differ_is_found():
    found = outcome("one_reads", "xla", **BY_TWO)
    assert_equal(found, outcome("one_reads", "llvm"))
    assert found["counted"]["ReplicasOverHost"] == 4


def test_processes_may_come_to_their_first_exchange_half_a_minute_apart():
    found = outcome("one_is_late", "xla", **BY_TWO)
    assert found["results"] == [[[4.0, 8.0]]] * 4
    assert found["host"] == []


def test_a_replica_that_does_not_connect_is_named():
    from ltc.backends.xla import connections  # where JAX is installed

    devices = np.array([SimpleNamespace(id=number) for number in (0, 1, 2048, 2049)])
    mesh = SimpleNamespace(mesh=SimpleNamespace(devices=devices))
    text = (
        "DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:gloo/0,2048/1 and duration: 30s"
    )
    assert connections._failure(mesh, RuntimeError(text)).startswith("Replica 2 launched")
    assert "no route" in connections._failure(mesh, RuntimeError("no route"))


ENDS = """
import os, signal, sys, time, torch
import ltc.core.lazy_model as ltm
from ltc.distributed import collectives
from ltc.errors import PeerFailure

x, is_first = torch.ones(2).to("ltc"), ltm.get_ordinal() == 0
collectives.all_reduce("sum", x).tolist()
if sys.argv[1] == "second dies":
    if not is_first:
        os._exit(3)
    try:
        collectives.all_reduce("sum", x).tolist()
    except PeerFailure:
        sys.exit(7)
elif sys.argv[1] == "second dies in the exchange":
    from ltc.backends.xla import joint_computation

    if not is_first:
        joint_computation._launched = lambda *_: os._exit(3)  # all have said that they launch
    try:
        collectives.all_reduce("sum", x).tolist()
    except PeerFailure as error:
        sys.exit(7 if str(error).startswith("Replica 1 (process ") else 8)
elif sys.argv[1] == "all are told to end":
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
elif not is_first:
    del os.environ["XRT_SHARD_ORDINAL"]  # as where it is known by a process group, which has gone
    time.sleep(2)
    assert (x + 1).tolist() == [2, 2]
    sys.exit(5)
"""


@pytest.mark.parametrize(
    ("case", "codes"),
    [
        ("second dies", [7, 3]),
        ("second dies in the exchange", [7, 3]),
        ("first ends", [0, 5]),
        ("all are told to end", [-15, -15]),
    ],
)
def test_a_process_ends_as_its_script_does(case, codes, tmp_path):
    found, said = ends_of(ENDS, case, 2, tmp_path)
    assert found == codes, said


def ends_of(script: str, argument: str, processes: int, folder: Path) -> tuple[list, list]:
    """The exit codes of the processes of a run, and what each has said."""
    folder.chmod(0o700)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "LTC_BACKEND": "xla", "JAX_PLATFORMS": "cpu",
        "LTC_RENDEZVOUS": str(folder), "XRT_SHARD_WORLD_SIZE": str(processes),
    }  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, argument], stderr=subprocess.PIPE, text=True,
            env={**environment, "XRT_SHARD_ORDINAL": str(ordinal)},
        )
        for ordinal in range(processes)
    ]  # fmt: skip
    said = [process.communicate()[1] for process in running]
    return [process.returncode for process in running], said


STAYS = """
import os, sys, time, torch
import ltc.core.lazy_model as ltm
from pathlib import Path
from ltc.backends.xla import joint_computation
from ltc.distributed import collectives
from ltc.errors import PeerFailure

def leave(*_):
    if sys.argv[1] == "dies":
        os._exit(3)
    raise ValueError("no part of this")

x, own, folder = torch.ones(2).to("ltc"), ltm.get_ordinal(), Path(os.environ["LTC_RENDEZVOUS"])
collectives.all_reduce("sum", x).tolist()
if own == 1:
    joint_computation._launched = leave  # all have said that they launch
try:
    collectives.all_reduce("sum", x).tolist()
except (PeerFailure, ValueError) as error:
    (folder / f"made-{own}").write_text(str(error))
    (folder / f"made-{own}").rename(folder / f"told-{own}")
told, deadline = 3 if sys.argv[1] == "dies" else 4, time.monotonic() + 600  # a hang ends here
while len(list(folder.glob("told-*"))) < told and time.monotonic() < deadline:
    time.sleep(0.01)  # nobody is told by the end of another one
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [("dies", 3, "Replica 1 (process "), ("raises", 7, "Replica 1 of 4 has failed:")],
)
def test_all_are_told_while_all_that_are_told_stay(case, code, words, tmp_path):
    """JAX's exchange of four is a circle: replica 3 is no neighbour of replica 1, and hears of 0 and 2."""
    found, said = ends_of(STAYS, case, 4, tmp_path)
    assert found == [7, code, 7, 7], said
    told = [(tmp_path / f"told-{other}").read_text().splitlines()[0] for other in (0, 2, 3)]
    assert told[0].startswith(words)
    assert told == told[:1] * 3


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("one_adds_otherwise", "Replicas do not run the same collectives"),
        ("one_raises", "no more of this"),
        ("one_dies", "exit code 3"),
    ],
)
def test_processes_that_fail_are_told(case, words):
    assert words in outcome(case, "xla", **BY_TWO)["error"]
