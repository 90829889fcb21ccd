"""The native core is built by another process, beside a program that would have used it.

The next program loads it.  That process runs on when this one ends: most programs are over before a
compiler is.  It writes nothing but the file in the cache, and no process waits for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ltc import config
from ltc.native import core_build
from ltc.runtime.background import compile_behind
from ltc.support.observation import metrics, spans
from ltc.support.process.daemon import started_daemon

# A build takes some 45 s of a processor, once.  A program that has made calls for so long is no short
# one, and goes on to make some.
PATIENCE_SECONDS = 5.0
PACKAGE = str(Path(__file__).parents[2])

# Where memory runs out, it is the compiler that is to be ended.
START = """
import os, sys, types
if os.fork():
    os._exit(0)
os.setsid()
os.chdir("/")
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
except OSError:
    pass
sys.path[:] = {paths!r}
sys.modules["ltc"] = types.ModuleType("ltc")
sys.modules["ltc"].__path__ = [{package!r}]
from ltc.native.core_build import build_as_asked
build_as_asked()
"""
_first: int | None = None  # when the first step ended
_is_settled = False  # whether a build was begun, or never will be


def step_ended() -> None:
    """A step has ended whose calls the core would have run."""
    global _first
    if _is_settled:
        return
    now = spans.now()
    if _first is None:
        _first = now
    elif now - _first > PATIENCE_SECONDS * 1e9:
        _settle()


def _settle() -> None:
    global _is_settled
    _is_settled = True
    is_wanted = config.value("LTC_NATIVE") == "auto" and config.value("LTC_COMPILE_BEHIND")
    if is_wanted and sys.executable:
        started_daemon(_begin, "ltc core build")


def _begin() -> None:
    """In a thread: the disk may be slow, and programs are compiled first."""
    compile_behind.wait()
    try:
        core_build.build_behind(_start)
    except (OSError, RuntimeError):  # there is no room for a process, or the program ends
        pass


def _start(lock: int, variables: dict[str, str]) -> None:
    paths = [os.path.abspath(path) for path in sys.path]
    begun = subprocess.Popen(
        [sys.executable, "-c", START.format(paths=paths, package=PACKAGE)],
        env=config.environment_with(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if config.value("LTC_DEBUG") else subprocess.DEVNULL,
        pass_fds=[lock],
    )
    begun.wait()  # it has started the process that builds
    metrics.count("CoreBuilds")
