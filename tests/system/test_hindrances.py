"""Programs with something planted that makes them slow: ltc names it, with the line and the cure."""

import copy
import os
import re
import subprocess
import sys
import time

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.device.evidence import reads_explained
from ltc.profiling.analysis.hindrances import hindrances
from ltc.profiling.analysis.verdict import verdict
from ltc.profiling.last_lines import summary
from ltc.profiling.trace import machine_facts, swapped_bytes
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


def trained(weight, optimizer):
    optimizer.zero_grad()
    loss = (weight * data(613)).exp().sum()
    loss.backward()
    optimizer.step()
    return loss


def trains_and_reads():
    weight = data(613).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(STEPS):
        loss = trained(weight, optimizer)
        loss.item()  # here
    return weight


def trains_and_reads_behind_the_mark():
    weight = data(613).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(STEPS):
        loss = trained(weight, optimizer)
        ltm.mark_step()
        loss.item()  # its step gives it
        (weight > 0.5).sum().item()  # here
    return weight


def samples():
    weight, chosen = data(20, 20), data(1, 20)
    for _ in range(30):
        chosen = (chosen @ weight).softmax(1) + chosen.tanh().exp().sin().cos().sigmoid().relu()
        chosen = chosen.sqrt().abs().neg().exp().log().sin().cos().tanh().sigmoid() * 0.5
        chosen.argmax().item()  # here
    return chosen


def trains_and_then_samples():
    weight = data(613).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(STEPS):
        trained(weight, optimizer)
        ltm.mark_step()
    return samples()


@pytest.mark.parametrize(
    ("program", "line_of", "words", "cure"),
    [
        (reads, reads, "before the mark", reads_explained.BEFORE_THE_MARK),
        (trains_and_reads, trains_and_reads, "without step marks", reads_explained.NO_MARK),
        (
            trains_and_reads_behind_the_mark, trains_and_reads_behind_the_mark, "before the mark",
            reads_explained.BEHIND_THE_MARK,
        ),
        (samples, samples, "in a loop without step marks", reads_explained.READING_LOOP),
        (trains_and_then_samples, samples, "in a loop without", reads_explained.READING_LOOP),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)  # fmt: skip
def test_each_kind_of_loop_with_reads_has_its_own_cure(program, line_of, words, cure, tmp_path):
    trace = profiled(program, tmp_path)
    found = {one.line: one for one in hindrances(trace) if one.name == "a read in a loop"}
    one = found.pop(line_to_blame(line_of))
    assert not found
    assert words in one.sentence and "0 steps" not in one.sentence.split()
    assert one.cure == cure
    assert [e.cure for e in ltc.explain(50) if e.line == one.line and e.kind == "cuts"][-1] == cure
    assert verdict(trace).kind != "recompiling"


def test_a_run_without_marks_is_bound_by_its_reads_and_not_by_two_compilations(tmp_path):
    found = verdict(profiled(samples, tmp_path))
    assert found.kind == "read-bound"
    assert re.fullmatch(r"no step is marked: \d+ reads end the recordings, .*", found.sentence)
    assert found.line == line_to_blame(samples)


@pytest.mark.parametrize(
    ("program", "name", "words"),
    [
        (much_python, "recording-bound", "% of a step is Python"),
        (nobody_marks, "never-marked loop", "the loop has no step mark"),
        (reads, "a read in a loop", "a value was read before the mark"),
        # The first three are noted.
        (ever_longer, "a growing set of shapes", f"{STEPS - 3} kinds so far, on one path"),
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
        "ltc bound", "ltc costliest lines", "ltc repeated events", "ltc suggested fixes", "ltc page",
    ]  # fmt: skip
    assert "program.py:5" in lines[1]
    assert "cuts 8 times at" in lines[2]
    assert "a read in a loop" in lines[3]
    (page,) = tmp_path.glob("ltc_*.html")
    assert lines[4] == f"ltc page: {page}"
    assert "program.py" in page.read_text()
