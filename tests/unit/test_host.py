"""What LLVM says of the machine is asked once for all processes."""

import os
import platform
import subprocess
import sys

import pytest

from ltc import config
from ltc.errors import Unsupported
from ltc.llvm.compiler import host_cpu, llvm_binding
from ltc.llvm.compiler.host_cpu import HostCpu, known_host

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other machines are asked in every process"
)
SAID = HostCpu("x86_64-somewhere", "fast", "+avx2", "20.1.0")


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    with config.override(LTC_CACHE_DIR=str(tmp_path / "cache")):
        yield


class Asked:
    """Answers, and counts how often it had to."""

    def __init__(self):
        self.times = 0

    def __call__(self) -> HostCpu:
        self.times += 1
        return SAID


def test_the_second_process_finds_the_answer():
    ask = Asked()
    assert known_host(ask) == known_host(ask) == SAID
    assert ask.times == 1


def test_without_a_cache_it_is_asked_each_time():
    ask = Asked()
    with config.override(LTC_CACHE=0):
        known_host(ask), known_host(ask)
    assert ask.times == 2


@pytest.mark.parametrize("part", ["_processor", "_llvm_library"])
def test_another_processor_or_llvm_is_asked_anew(monkeypatch, part):
    ask = Asked()
    known_host(ask)
    monkeypatch.setattr(host_cpu, part, lambda: ["another"])
    known_host(ask)
    assert ask.times == 2


def test_where_llvm_can_not_be_found_the_question_says_so(monkeypatch):
    monkeypatch.setattr(host_cpu, "_llvm_library", host_cpu._llvm_library.__wrapped__)
    monkeypatch.setattr(host_cpu.importlib.util, "find_spec", lambda name: None)
    ask = Asked()
    known_host(ask), known_host(ask)
    assert ask.times == 2


def test_this_machine_is_known_by_what_stays_the_same():
    assert host_cpu._name() == host_cpu._name() is not None
    assert known_host(llvm_binding._asked) == llvm_binding._asked()


@pytest.mark.parametrize(
    ("wanted", "has", "lacks"), [("avx2", "avx2", "avx512f"), ("sse4", "sse4.2", "avx")]
)
def test_fewer_instructions_may_be_asked_for(wanted, has, lacks):
    if not llvm_binding.has_feature(has):
        pytest.skip("this processor has less")
    script = (
        "import torch, ltc; from ltc.llvm.compiler import llvm_binding as b;"
        "print((torch.ones(100, device='ltc') * 3).sum().item(), b.host().cpu,"
        f"b.has_feature({has!r}), b.has_feature({lacks!r}))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "LTC_ISA": wanted},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    level = {"avx2": "x86-64-v3", "sse4": "x86-64-v2"}[wanted]
    assert printed.split() == ["300.0", level, "True", "False"]


def test_more_instructions_than_there_are_raises_an_error():
    with config.override(LTC_ISA="avx2"), pytest.raises(Unsupported, match="this processor lacks"):
        host_cpu.allowed("old", "+sse,+sse2")
