"""Liveness by reference counts is found out at import, and refused where it cannot be."""

import subprocess
import sys

import pytest

from ltc.support import reference_counts as counts


def test_one_more_holder_is_one_more_reference():
    held = [object()]
    assert counts.reference_counts(held) == [counts.IN_ONE_LIST]
    second = list(held)
    assert counts.reference_counts(second) == [counts.IN_TWO_LISTS]
    assert counts.each_holder_counts()


def imported_with(getrefcount: str) -> subprocess.CompletedProcess:
    program = f"import sys; real = sys.getrefcount; sys.getrefcount = {getrefcount}; import ltc"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "getrefcount",
    ["lambda x: 1 << 30", "lambda x: min(real(x), 4)", "lambda x: 2 * real(x)", "lambda x: 0"],
)
def test_a_python_that_counts_otherwise_is_refused(getrefcount):
    run = imported_with(getrefcount)
    assert run.returncode == 1
    assert "This Python counts references in a way that ltc does not know" in run.stderr
    assert f"this one is cpython {sys.version.split()[0]}" in run.stderr


def test_a_python_that_counts_every_object_higher_is_not():
    run = imported_with("lambda x: real(x) + 7")
    assert run.returncode == 0, run.stderr


def test_a_free_threaded_build_is_refused(monkeypatch):
    assert counts.each_holder_counts()
    monkeypatch.setattr(sys, "abiflags", "t")
    assert not counts.each_holder_counts()


def test_what_a_function_is_given_makes_no_holder_count_less():
    def below(depth: int, given: object, held: list) -> int:
        if depth:
            return below(depth - 1, given, held)
        (count,) = counts.reference_counts(held)
        return count

    held = [object()]
    for _ in range(100):  # until the interpreter passes arguments in its quickest way
        assert below(3, held[0], held) >= counts.IN_ONE_LIST
        assert below(3, None, held) == counts.IN_ONE_LIST
