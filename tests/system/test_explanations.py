"""What made a program slow is kept, bounded, and told: by `explain`, and by loggers."""

import logging
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.explaining import history
from ltc.explaining.explanation import Explanation
from ltc.native.core import CORE
from tests.explained import data, in_a_thread, line_to_blame


@pytest.fixture(autouse=True)
def nothing_of_before():
    history.forget()


@pytest.mark.native("what is explained is a step that was recorded")
def test_a_read_before_the_mark_is_told_each_time_it_is_made():
    def logged():
        x = data(7).exp().sum()
        x.item()  # here
        ltm.mark_step()

    for _ in range(3):
        logged()
    (cut,) = ltc.explain()
    assert (cut.kind, cut.reason, cut.times) == ("cuts", "read", 3)
    assert cut.line == line_to_blame(logged)
    assert "aten::sum" in cut.difference
    assert "called from" in str(cut)  # the line of the loop


@pytest.mark.native("what is explained is a step that was recorded")
def test_a_call_that_runs_eagerly_is_told_with_its_line():
    def selecting():
        return data(9).nonzero()  # here

    selecting()
    (explanation,) = [
        explanation for explanation in ltc.explain() if explanation.kind == "fallbacks"
    ]
    assert "aten::nonzero" in explanation.what
    assert explanation.line == line_to_blame(selecting)


@pytest.mark.filterwarnings("ignore:.*without a step mark")
def test_a_size_behind_a_call_that_runs_eagerly_is_told_not_the_call():
    def chosen(count):
        mask = torch.zeros(9)
        mask[:count] = 1
        places = mask.to("ltc").nonzero()
        total = places.exp()  # here
        ltm.mark_step()
        return total

    def both():
        chosen(3)
        chosen(5)
        return [one for one in ltc.explain() if one.kind == "recompiles"]

    with config.override(LTC_TIER="native", LTC_CACHE=0):
        (made,) = in_a_thread(both)
    assert (made.reason, made.line) == ("shape", line_to_blame(chosen))
    assert "dimension 0 is 5, was 3" in made.difference


@pytest.mark.native("what is explained is a step that was recorded")
def test_a_loop_that_nobody_marks_is_told():
    def endless():
        x = data(11)
        with config.override(LTC_MAX_PENDING_NODES=20):
            for _ in range(30):
                x = x.exp()  # here
        return x

    x = in_a_thread(endless)
    (cut,) = [explanation for explanation in ltc.explain() if explanation.reason == "unmarked"]
    assert cut.line == line_to_blame(endless)
    assert x.shape == (11,)


@pytest.mark.native("what has run needs no other thread")
def test_a_tensor_needed_in_another_thread_is_told():
    pending = data(13).exp()
    in_a_thread(lambda: (pending + 1).tolist())
    assert "thread" in [explanation.reason for explanation in ltc.explain()]


def test_a_growing_set_of_shapes_is_told_as_a_change_of_tier():
    def growing():
        for rows in range(20, 30):
            loss = data(rows, 31).exp().sum()  # here
            ltm.mark_step()
        return loss

    with config.override(LTC_TIER="auto", LTC_NUM_DEVICES=1):
        in_a_thread(growing)
    told = [explanation for explanation in ltc.explain(last=100) if explanation.kind == "tiers"]
    told = [explanation for explanation in told if "one path of symbols" in explanation.what]
    assert [explanation.line for explanation in told] == [line_to_blame(growing)]
    assert [explanation.reason for explanation in told] == ["symbolic"]


def test_a_program_that_is_compiled_because_it_comes_back_says_so():
    def repeated():
        for _ in range(6):
            loss = data(37).exp().sum()
            ltm.mark_step()
        return loss

    with config.override(LTC_TIER="auto", LTC_NUM_DEVICES=1, LTC_CACHE=0):
        in_a_thread(repeated)
    (told,) = ltc.explain()  # nothing was dropped, and nothing compiled again
    assert told.reason == "repeated"
    assert "is compiled" in told.what
    assert "the path came back" in told.difference


def test_each_transition_is_printed_with_its_reason_and_numbers(caplog):
    def restless():
        x = data(39)
        for function in (torch.exp, torch.exp, torch.exp, torch.sin, torch.exp):
            loss = (function(x) * 2).sum()
            ltm.mark_step()
        for number in range(20):  # as in an environment
            loss = (x + number).sum()
            loss.item()
        return loss

    with config.override(LTC_TIER="auto", LTC_NUM_DEVICES=1, LTC_CACHE=0):
        with caplog.at_level(logging.INFO, "ltc.tiers"):
            in_a_thread(restless)
    printed = iter([record.getMessage() for record in caplog.records])
    rests = (
        "the next calls run at once, and are not noted",
        "8 paths in a row, of at most 16 calls",
    )
    for what, why in (
        ("a path of 3 calls is hot", "it came back once"),
        ("the next calls are followed", "has a program, and came back once"),
        ("a program of 4 calls is compiled", "the path came back"),
        ("a side exit", "got aten::sin(float32[39])"),
        ("0 calls were followed in vain", "are noted once, then followed again"),
        *([rests] if CORE is None else []),  # the core sums up what it does not note
    ):
        assert any(what in text and why in text for text in printed), (what, why)


def test_a_transition_that_takes_no_time_is_not_kept():
    def repeated():
        x = data(40)
        for _ in range(3):
            loss = (x.exp() * 2).sum()
            ltm.mark_step()
        return loss

    with config.override(LTC_TIER="auto", LTC_NUM_DEVICES=1, LTC_CACHE=0):
        in_a_thread(repeated)
    assert [one.reason for one in ltc.explain()] == ["repeated"]


def test_a_side_exit_tells_what_came_this_time():
    def leaving():
        for rows in (3, 3, 3, 4, 3, 3, 3, 5):
            loss = (data(rows, 43).exp() * 2).sum()
            ltm.mark_step()
        return loss

    with config.override(LTC_TIER="auto", LTC_NUM_DEVICES=1, LTC_CACHE=0, LTC_SYMBOLIC=0):
        in_a_thread(leaving)
    told = [one.difference for one in ltc.explain(last=100) if "side exit" in one.what]
    assert "dimension 0 is 4, was 3" in told[0]
    assert "dimension 0 is 5, was 3" in told[-1]


@pytest.mark.native("what is explained is a step that was recorded")
def test_a_program_that_was_dropped_says_so():
    def other(n):
        loss = data(n, 41).exp()
        ltm.mark_step()
        return loss

    with config.override(LTC_CACHE_PROGRAMS=1):
        for n in (1, 2, 1):
            other(n)
    assert "forgotten" in [explanation.reason for explanation in ltc.explain()]


def test_another_default_dtype_in_mid_step_is_told():
    x = data(43).exp() + torch.zeros(43, device="ltc")
    try:
        torch.set_default_dtype(torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)
    (cut,) = ltc.explain()
    assert (cut.kind, cut.reason) == ("cuts", "dtype")
    assert x.shape == (43,)


class Trainer:
    """Holds what its steps make, in different places."""

    def __init__(self):
        self.kept, self._last = [], None

    def step(self, n, where):
        hidden = data(n, 5).cos()
        loss = hidden.sum()
        if where == "list":
            self.kept.append({"hidden": hidden})
        if where == "attribute":
            self._last = hidden
        if where != "variable":
            del hidden
        ltm.mark_step()
        self.kept, self._last = [], None
        return loss


@pytest.mark.native("what is explained is a step that was recorded")
@pytest.mark.parametrize(
    ("n", "where", "name"),
    [
        (51, "list", "`self.kept[0]['hidden']`"),
        (52, "attribute", "`self._last`"),
        (53, "variable", "`hidden`"),
    ],
)
def test_what_holds_a_tensor_that_is_alive_now_and_was_not_is_named(n, where, name):
    trainer = Trainer()
    for place in ("nowhere", "nowhere", where):
        trainer.step(n, place)
    assert f"also alive at its end: {name}, float32[{n}, 5]" in str(ltc.explain(last=1))


@pytest.mark.native("what is explained is a step that was recorded")
def test_what_held_a_tensor_that_is_no_longer_alive_is_named():
    trainer = Trainer()
    for place in ("list", "list", "nowhere"):
        trainer.step(54, place)
    assert "no longer alive: `self.kept[0]['hidden']`" in str(ltc.explain(last=1))


class Wicked:
    """Nobody may look at it."""

    def __getattribute__(self, name):
        raise RuntimeError("on purpose")


@pytest.mark.native("what is explained is a step that was recorded")
def test_objects_that_cannot_be_looked_at_are_in_nobodys_way():
    def step(keep):
        wicked, kept = Wicked(), []
        hidden = data(56, 5).cos()
        loss = hidden.sum()
        if keep:
            kept.append(hidden)
        del hidden
        ltm.mark_step()
        return wicked, kept, loss

    for keep in (False, False, True):
        step(keep)
    assert "also alive at its end:" in str(ltc.explain(last=1))


def test_looking_for_names_holds_nothing():
    def step():
        hidden = data(55).cos()
        ltm.mark_step()  # a new program: its variables are looked at
        reference = weakref.ref(hidden)
        del hidden
        return reference()

    assert step() is None


# --- what is kept ---------------------------------------------------------------------------------


def test_where_nothing_was_recorded_there_is_an_answer():
    assert str(ltc.explain()).startswith("Nothing to explain")
    assert str(in_a_thread(ltc.explain)).startswith("Nothing to explain")


def test_the_latest_are_told_the_newest_last():
    for number in range(5):
        history.note(Explanation("cuts", (), f"cut {number}", "why"))
    assert [explanation.what for explanation in ltc.explain(last=2)] == ["cut 3", "cut 4"]
    assert list(ltc.explain(last=0)) == []


def test_the_table_is_bounded():
    for number in range(history.MOST + 10):
        history.note(Explanation("cuts", (), f"cut {number}", "why"))
    assert len(ltc.explain(last=10_000)) == history.MOST


def test_an_event_that_left_the_table_comes_back_when_it_happens_again():
    first = history.note(Explanation("cuts", (), "the first", "why"))
    history.forget()
    history.again(first)
    assert [explanation.what for explanation in ltc.explain()] == ["the first"]


def test_a_forked_worker_can_explain():
    reader, writer = os.pipe()
    history.note(Explanation("cuts", (), "before the fork", "why"))
    if os.fork() == 0:
        history.note(Explanation("cuts", (), "in the worker", "why"))
        os.write(writer, str(ltc.explain()).encode())
        os._exit(0)
    os.wait()
    told = os.read(reader, 10_000).decode()
    assert "before the fork" in told
    assert "in the worker" in told


def test_after_a_rank_has_died_there_is_an_answer():
    with pytest.raises(ltc.distributed.lazy_multiprocessing.RankFailed):
        ltc.launch(_dies, nprocs=2)
    assert str(ltc.explain())


def _dies(rank):
    raise ValueError("on purpose")


def test_what_is_told_goes_to_the_loggers(caplog):
    with caplog.at_level(logging.INFO, logger="ltc.cuts"):
        history.note(Explanation("cuts", (), "a cut", "why"))
        history.note(Explanation("fallbacks", (), "a fallback", "why"))
    assert [record.name for record in caplog.records] == ["ltc.cuts"]
    assert "a cut" in caplog.text


def test_the_switches_of_torchs_own_logs_print_the_like(caplog):
    heard = logging.getLogger("torch.ltc.__graph_breaks")
    heard.addHandler(caplog.handler)
    torch._logging.set_logs(graph_breaks=True)
    try:
        history.note(Explanation("cuts", (), "a cut", "why"))
        history.note(Explanation("recompiles", (), "a program", "why"))
    finally:
        torch._logging.set_logs()
        heard.removeHandler(caplog.handler)
    assert "a cut" in caplog.text
    assert "a program" not in caplog.text


LOGGED = """
import torch, ltc
x = torch.ones(3, device="ltc").sum()
x.item()
torch.ones(3, device="ltc").nonzero()
"""


def run(program, **environment):
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)} | environment,
    )


@pytest.mark.native("what is explained is a step that was recorded")
def test_the_variable_names_what_is_printed():
    said = run(LOGGED, LTC_LOG="cuts").stderr
    assert "[cuts] the step was cut by a read" in said
    assert "[fallbacks]" not in said


def test_a_wrong_word_in_the_variable_is_an_error_that_names_the_right_ones():
    done = run("import ltc", LTC_LOG="cust")
    assert done.returncode != 0
    assert "LTC_LOG=cust: expected some of compiles, recompiles, cuts" in done.stderr
