"""The gate of a thread's calls in the native core, under every interleaving of two threads."""

import re
from pathlib import Path

import pytest

import ltc.native
from tests.models import gate as model
from tests.models.actions import Actions
from tests.models.interleavings import Broken

SOURCE = Path(ltc.native.__file__).parent / "csrc" / "gate.h"
FUNCTION = re.compile(r"(~?\w+)\([^()]*\)(?: const)?(?: :.*)? \{")
ACTION = re.compile(r"(\w+)\.(load|store|exchange)\([^()]*std::memory_order_(\w+)\)")
KINDS = {"exchange": "xchg"}
# Of the model alone: what a call writes, and who reads it.
NOT_IN_SOURCE = {"call choose", "call store value monotonic", "closer load value monotonic"}
# All that other threads rely on; without its order the protocol fails.
ORDERED = [
    "close store runs_ seq_cst",
    "close store follows_ seq_cst",
    "stop_summing store sums_ seq_cst",
    "runs load runs_ seq_cst",
    "follows load follows_ seq_cst",
    "sums load sums_ seq_cst",
    "wait load is_inside_ seq_cst",
    "~Inside store is_inside_ release",
    "Inside xchg is_inside_ seq_cst",
]


def actions_of_source() -> set[str]:
    """The atomic actions of gate.h, each by its function, as the model names them."""
    found, function = set(), ""
    for line in SOURCE.read_text().splitlines():
        for match in FUNCTION.finditer(line):
            function = match[1]
        for variable, kind, order in ACTION.findall(line):
            found.add(f"{function} {KINDS.get(kind, kind)} {variable} {order}")
    return found


def test_no_call_runs_behind_a_closed_gate_and_what_ran_is_seen():
    assert model.machine(model.Gate(Actions())).explore() > 100


def test_the_model_does_what_the_source_does():
    machine = model.machine(model.Gate(Actions()))
    machine.explore()
    assert machine.done - NOT_IN_SOURCE == actions_of_source() == set(ORDERED)


@pytest.mark.parametrize("name", ORDERED)
def test_without_its_order_the_protocol_fails(name):
    with pytest.raises(Broken):
        model.machine(model.Gate(Actions(unordered=[name]))).explore()


def test_a_call_within_another_does_not_end_it():
    with pytest.raises(Broken):
        model.machine(model.Gate(Actions(), comes_back=False)).explore()
