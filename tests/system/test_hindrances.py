"""Programs with something planted that makes them slow: ltc names it, with the line and the cure."""

import copy
import os
import subprocess
import sys
import time

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.profiling.analysis.hindrances import hindrances
from ltc.profiling.analysis.verdict import verdict
from ltc.profiling.last_lines import summary
from ltc.profiling.machine_facts import machine_facts, swapped_bytes
from tests.explained import data, in_a_thread, line_to_blame

STEPS = 12


def profiled(program, tmp_path, **settings):
    """The trace of a program that runs as it does by default, in a thread of its own."""
    settings = {"LTC_TIER": "auto", "LTC_NUM_DEVICES": 1, "LTC_CHECK": 0, "LTC_CACHE": 0} | settings
    with config.override(**settings):
        with ltc.profile(html=tmp_path / "page.html") as run:
            in_a_thread(program)
    return run.trace


def much_python():
    for _ in range(STEPS):
        loss = data(601).exp().sum()
        time.sleep(0.004)  # Python of the step's
        ltm.mark_step()
    return loss


def nobody_marks():
    weight = data(603).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(20):  # more than what two marks may have between them
        optimizer.zero_grad()
        weight.exp().sum().backward()
        optimizer.step()
    return weight


def reads():
    for _ in range(STEPS):
        loss = data(605).exp().sum()
        loss.item()  # here
        ltm.mark_step()
    return loss


def ever_longer():
    for length in range(STEPS):
        loss = data(607, 10 + length).exp().sum()  # here
        ltm.mark_step()
    return loss


def selects():
    for _ in range(STEPS):
        x = data(609)
        found = x.nonzero()  # here
        ltm.mark_step()
    return found


@pytest.mark.parametrize(
    ("program", "name", "words"),
    [
        (much_python, "recording-bound", "% of a step is Python"),
        (nobody_marks, "never-marked loop", "nobody marks its steps"),
        (reads, "a read in a loop", "a value was read before the mark"),
        # The first two are recorded.
        (ever_longer, "a growing set of shapes", f"{STEPS - 2} kinds so far, of one path"),
        (selects, "an eager call in the hot path", "aten::nonzero"),
    ],
)
def test_what_was_planted_is_named_with_its_line(program, name, words, tmp_path):
    trace = profiled(program, tmp_path)
    found = {one.name: one for one in hindrances(trace)}
    assert name in found, found
    assert words in found[name].sentence
    assert found[name].cure
    assert found[name].cure in summary(trace)[3]
    if program in (reads, ever_longer, selects):
        assert found[name].line == line_to_blame(program)


def test_shapes_that_no_path_of_symbols_takes_are_named_as_well(tmp_path):
    trace = profiled(ever_longer, tmp_path, LTC_SYMBOLIC=0)
    (one,) = [one for one in hindrances(trace) if one.name == "a growing set of shapes"]
    # The first two are recorded; what comes behind them runs op by op, and is told each time.
    assert f"{STEPS - 2} times a step ran op by op, at shapes that were new" in one.sentence
    assert one.line == line_to_blame(ever_longer)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    def steady():
        weight = data(611, 300)
        for _ in range(STEPS):
            weight = (weight * 1.01).tanh()
            ltm.mark_step(wait=True)
        return weight

    return profiled(steady, tmp_path_factory.mktemp("healthy"))


@pytest.mark.parametrize(
    ("name", "threads", "machine"),
    [
        ("too many threads", 8, {"cores": 4, "processes": 1}),
        ("too many threads", 2, {"cores": 4, "processes": 4}),
        ("too few threads", 1, {"cores": 8, "processes": 1}),
        ("swap", 2, {"cores": 2, "processes": 1, "swapped_bytes": 1 << 30, "major_faults": 10_000}),
    ],
)
def test_a_machine_that_is_used_badly_is_named(name, threads, machine, healthy):
    trace = copy.deepcopy(healthy)
    (process,) = trace["ltc"]["processes"]
    process["threads"], process["machine"] = threads, machine
    for step in trace["ltc"]["steps"]:  # whatever the machine does beside: programs run
        step["begin_us"] = step["end_us"] - 1.0
    assert name in [one.name for one in hindrances(trace)]


def test_a_healthy_program_has_nothing_to_mend(healthy):
    trace = copy.deepcopy(healthy)
    trace["ltc"]["processes"][0]["machine"] = None  # that of the tests may be used badly
    assert [one for one in hindrances(trace) if one.name != "recording-bound"] == []
    assert verdict(trace).kind != "recompiling"
    assert "nothing was compiled, cut or run eagerly" in summary(trace)[2]


def test_what_a_process_has_of_its_machine_is_known(tmp_path):
    facts = machine_facts()
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["processes"] >= 1
    (tmp_path / "status").write_text("VmRSS:\t 12 kB\nVmSwap:\t 34 kB\n")
    assert swapped_bytes(str(tmp_path / "status")) == 34 << 10


PROGRAM = """
import torch, ltc
import ltc.core.lazy_model as ltm
for rows in range(8):
    x = torch.ones(rows + 1, 4, device="ltc").exp().sum()
    x.item()
    ltm.mark_step()
"""


def test_a_program_under_debug_ends_with_five_lines_and_a_page(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"LTC_DEBUG": "1", "TMPDIR": str(tmp_path), "LTC_CHECK": "0"},
    )
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "ltc bound", "ltc costliest lines", "ltc again and again", "ltc to mend", "ltc page",
    ]  # fmt: skip
    assert "program.py:5" in lines[1]
    assert "cuts 8 times at" in lines[2]
    assert "a read in a loop" in lines[3]
    (page,) = tmp_path.glob("ltc_*.html")
    assert lines[4] == f"ltc page: {page}"
    assert "program.py" in page.read_text()
