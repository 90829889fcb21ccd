"""The native core: built by the machine's compiler, tried, and used where it was asked for."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ltc.native import core_build as build
from ltc.support.disk_cache import DiskCache, OwnFolder

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")

# Calls of each kind that the core runs, and of some that it leaves to Python, beside the CPU.
PROGRAM = """
import torch, ltc
from ltc.native.core import CORE

def run(device):
    x = torch.arange(12.0).reshape(3, 4).to(device)
    kept, part = x[1], x.t()
    x.add_(1); part[0].mul_(2); kept += part[:, 0].sum()
    whole = x.transpose(0, 1).reshape(12)  # of a view that is not contiguous: a copy
    x.zero_()
    torch._foreach_add_([x, kept], 1.0)
    chosen = whole[whole > 5]
    w = torch.ones(2, 4, device=device, requires_grad=True)
    v = torch.ones(4, 2, device=device, requires_grad=True)
    ((w.reshape(8) + v.t().reshape(8)) ** 2).sum().backward()  # gradients that are views of one
    w.grad.add_(1); v.grad.mul_(3)
    first, second = torch.split(whole, [5, 7])
    negated = torch._neg_view(whole + 1) * 2
    product = torch.nn.functional.linear(x, w)
    return x, kept, part, whole, chosen, w.grad, v.grad, first, second, negated, product, x.sum().item()

for _ in range(3):
    for ours, theirs in zip(run("ltc"), run("cpu")):
        if isinstance(ours, torch.Tensor):
            ours = ours.detach().cpu(); theirs = theirs.detach()
        torch.testing.assert_close(ours, theirs)
assert CORE.ran() > 60, CORE.ran()
print("right", sorted(CORE.left_to_python()))
"""


def run(*command: str, cache: Path, **variables: str) -> subprocess.CompletedProcess:
    done = started(*command, cache=cache, **variables)
    said, complained = done.communicate()
    return subprocess.CompletedProcess(command, done.returncode, said, complained)


def started(*command: str, cache: Path, **variables: str) -> subprocess.Popen:
    chosen = {"LTC_NATIVE": "0", "LTC_CACHE_DIR": str(cache), "LTC_NUM_DEVICES": "1", **variables}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LTC_NATIVE_DIR": "", **chosen}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@needs_compiler
def test_what_is_built_is_kept_tried_and_right(tmp_path):
    made = run("-m", "ltc", "build", cache=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    assert "built and tested" in made.stdout
    used = {"LTC_NATIVE": "require", "LTC_TIER": "op_by_op"}
    told = run("-c", PROGRAM, cache=tmp_path, **used)
    assert told.stdout.startswith("right"), told.stderr
    assert core_of(tmp_path) == "used"
    assert core_of(tmp_path, CXX="no-such-compiler") == "used"  # an image may have none any more
    tests = run(
        *("-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:xdist", "-p", "no:cacheprovider"),
        *("tests/system/test_immediate_calls.py", "tests/unit/test_native_states.py"),
        cache=tmp_path,
        **used,
    )
    assert tests.returncode == 0, tests.stdout[-4000:]


@pytest.fixture
def compiler(tmp_path):
    """A compiler in place of the machine's, which waits for a file if it is told to.

    It gives the library that the tests run with, or where they have none says so and fails.
    """
    made = tmp_path / "compiler"
    built = build.found()
    made.with_suffix(".so").write_bytes(built.library if built else b"")
    made.write_text(COMPILER)
    made.chmod(0o700)
    return made


COMPILER = """#!/bin/sh
echo asked >> $0.log
while [ -e $0.wait ]; do sleep 0.05; done
[ -s $0.so ] || { echo no C++ today >&2; exit 1; }
while [ "$1" != -o ]; do shift; done
cp $0.so "$2"
"""

# A program whose calls run for as long as it takes to have the core built.
GOES_ON = """
import threading, torch, ltc
from ltc.debug import metrics
from ltc.runtime.background import core_build_behind
core_build_behind.PATIENCE_SECONDS = 0
x = torch.ones(3).to("ltc")
for _ in range(3): (x + 1).sum().item()
for thread in threading.enumerate():
    if thread.name == "ltc core build": thread.join()
print(metrics.counter_value("CoreBuilds"))
"""


def asked(compiler: Path) -> int:
    log = Path(f"{compiler}.log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def wait_for_build(cache: Path) -> None:
    os.close(DiskCache(cache).lock(build._LOCK, wait=True))


def core_of(cache: Path, **variables: str) -> str:
    """What `info` says of the core."""
    told = run("-m", "ltc", "info", cache=cache, LTC_NATIVE="auto", **variables).stdout
    return next(line[13:] for line in told.splitlines() if line.startswith("native core"))


def test_of_processes_that_go_on_one_has_the_core_built_for_the_next(tmp_path, compiler):
    cache, chosen = tmp_path / "cache", {"LTC_NATIVE": "auto", "CXX": str(compiler)}
    several = [started("-c", GOES_ON, cache=cache, **chosen) for _ in range(3)]
    told = [one.communicate() for one in several]
    assert sorted(said for said, _ in told) == ["1\n", "None\n", "None\n"], told
    wait_for_build(cache)
    assert asked(compiler) == 1
    expected = "used" if build.found() else f"none: {compiler} failed:"
    assert core_of(cache, CXX=str(compiler)) == expected
    again = run("-c", GOES_ON, cache=cache, **chosen)
    assert (again.stdout, asked(compiler)) == ("None\n", 1), again.stderr


def test_a_build_does_not_keep_the_program_from_its_end(tmp_path, compiler):
    cache, hold = tmp_path / "cache", Path(f"{compiler}.wait")
    hold.touch()
    told = run("-c", GOES_ON, cache=cache, LTC_NATIVE="auto", CXX=str(compiler))
    assert told.stdout == "1\n", told.stderr  # it is over, and so are its pipes
    assert DiskCache(cache).lock(build._LOCK, wait=False) is None  # the other process is at work
    assert core_of(cache, CXX=str(compiler)).startswith("none: it is not built yet")
    hold.unlink()
    wait_for_build(cache)
    assert asked(compiler) == 1


@pytest.mark.parametrize(
    "variables",
    [{"LTC_NATIVE": "0"}, {"LTC_COMPILE_BEHIND": "0"}, {"LTC_CACHE": "0"}, {"CXX": "no-such"}],
    ids=lambda variables: "".join(variables),
)
def test_nothing_is_built_behind_where_it_is_not_wanted_or_cannot_be(tmp_path, compiler, variables):
    chosen = {"LTC_NATIVE": "auto", "CXX": str(compiler), **variables}
    told = run("-c", GOES_ON, cache=tmp_path / "cache", **chosen)
    assert (told.stdout, asked(compiler)) == ("None\n", 0), told.stderr


def test_a_program_that_ends_at_once_builds_nothing(tmp_path, compiler):
    program = GOES_ON.replace("range(3)", "range(1)")
    told = run("-c", program, cache=tmp_path, LTC_NATIVE="auto", CXX=str(compiler))
    assert told.stdout == "None\n", told.stderr
    assert not (tmp_path / build._LOCK).exists()


def test_children_of_fork_leave_the_build_to_their_parent(tmp_path, compiler):
    program = GOES_ON + FORKS
    told = run("-c", program, cache=tmp_path / "cache", LTC_NATIVE="auto", CXX=str(compiler))
    assert told.stdout == "1\nNone None\n", told.stderr
    wait_for_build(tmp_path / "cache")
    assert asked(compiler) == 1


FORKS = """
metrics.clear_all()
def child(into):
    for _ in range(3): (x + 1).sum().item()
    into.put(str(metrics.counter_value("CoreBuilds")))
import multiprocessing
forked = multiprocessing.get_context("fork")
said = forked.Queue()
children = [forked.Process(target=child, args=(said,)) for _ in range(2)]
for one in children: one.start()
print(said.get(), said.get())
for one in children: one.join()
"""


def test_a_compiler_that_fails_is_told_of_and_asked_again_by_who_asks_for_it(tmp_path):
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho asked >> $0.log\necho no C++ today >&2\nexit 1\n")
    broken.chmod(0o700)
    cache, chosen = tmp_path / "cache", {"CXX": str(broken)}
    made = run("-m", "ltc", "build", cache=cache, **chosen)
    assert made.returncode == 1
    assert "broken-compiler failed:\nno C++ today" in made.stderr
    assert core_of(cache, **chosen) == f"none: {broken} failed:"
    program = GOES_ON + "print(ltc.explain())"
    told = run("-c", program, cache=cache, LTC_NATIVE="auto", **chosen).stdout
    assert told.startswith("None\n[tiers] there is no native core"), told
    assert f"  {broken} failed:\n  cure: mend that, then run python -m ltc build" in told
    assert asked(broken) == 1
    assert run("-m", "ltc", "build", cache=cache, **chosen).returncode == 1
    assert asked(broken) == 2


def test_builds_that_are_ended_are_not_begun_for_ever(tmp_path, monkeypatch):
    monkeypatch.setenv("LTC_NATIVE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: sys.executable)
    monkeypatch.setattr(build, "compiled", killed)
    for _ in range(build.MOST_BEGUN):
        assert build.found() is None
        with pytest.raises(Killed):
            build.build_as_asked()
    assert build.found().failure == "3 builds were ended before they had come to an end"


class Killed(BaseException):
    pass


def killed(_library):
    raise Killed


def test_on_a_full_disk_nothing_is_compiled_and_one_line_says_so(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("LTC_NATIVE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: sys.executable)
    monkeypatch.setattr(build, "compiled", killed)
    monkeypatch.setattr(OwnFolder, "put", full)
    with pytest.raises(build.CannotBuild, match="cannot be kept: .*No space left on device"):
        build.build()
    assert build.found() is None


@pytest.mark.parametrize("folder", ["/proc/none", "a-file/cache"])
def test_where_no_cache_can_be_made_one_line_says_so(tmp_path, folder):
    (tmp_path / "a-file").touch()
    cache = tmp_path / folder
    made = run("-m", "ltc", "build", cache=cache)
    assert made.returncode == 1
    assert made.stderr.startswith(f"the native core cannot be kept: ltc's cache: {cache} cannot be")
    assert len(made.stderr.splitlines()) == 1
    told = run("-W", "ignore", "-c", GOES_ON, cache=cache, LTC_NATIVE="auto")
    assert told.stdout == "None\n", told.stderr


def test_without_a_compiler_one_line_says_so(tmp_path):
    made = run("-m", "ltc", "build", cache=tmp_path, CXX="no-such-compiler")
    assert made.returncode == 1
    assert made.stderr == (
        "no C++ compiler was found: CXX names no-such-compiler, which is not there\n"
    )
    why = "no C++ compiler was found: CXX names no-such-compiler, which is not there"
    assert core_of(tmp_path, CXX="no-such-compiler") == f"none: {why}"
    told = run(
        "-c",
        "import ltc; print(ltc.explain())",
        cache=tmp_path,
        LTC_NATIVE="auto",
        CXX="no-such-compiler",
    )
    assert f"  {why}\n  cure: install g++ or clang++" in told.stdout


def test_a_core_that_is_required_and_not_built_is_an_error(tmp_path):
    told = run("-c", "import ltc", cache=tmp_path, LTC_NATIVE="require")
    assert told.returncode == 1
    assert "LTC_NATIVE=require, and there is no native core" in told.stderr
    assert "python -m ltc build" in told.stderr


def name() -> str:
    build._digest.cache_clear()
    return build._name()


def test_what_is_built_depends_on_sources_compiler_and_torch(monkeypatch):
    names = {name()}
    monkeypatch.setattr(build, "_compiler_text", lambda: "another compiler")
    names.add(name())
    monkeypatch.setattr(build.torch.version, "git_version", "another")
    names.add(name())
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    names.add(name())
    assert len(names) == 4
    build._digest.cache_clear()
