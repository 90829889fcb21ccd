"""Run the native core's tests over builds that look at each access to memory.

    python scripts/stress/sanitizers.py [address] [undefined] [thread] [--tests FILE ...] [--keep FOLDER]

They build the core with AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer; without any, all run
in turns.  Only the core is built so: Python, PyTorch and compiled programs are as they are.  Faults that are
planted in a small library have to be reported first: else nothing is looked at.  A build takes two minutes, and
the tests some five, of one processor.  The exit status is 1 where a test fails, or a report names the core.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ltc.native import core_build

ROOT = Path(__file__).parents[2]
THREADS = (
    "tests/system/test_threads.py",
    "tests/system/test_thread_switches.py",
    "tests/system/test_core_ends.py",
    "tests/unit/test_native_states.py",
)
ALL = (
    *THREADS,
    "tests/system/test_immediate_calls.py",
    "tests/system/test_last_views.py",
    "tests/system/test_adam_step.py",
    "tests/system/test_attention.py",
    "tests/system/test_random_numbers.py",
    "tests/system/test_random_views.py",
    "tests/system/test_unmarked_loops.py",
)


class Sanitizer(NamedTuple):
    """A build of the core, and the environment of processes that run with it.

    Attributes:
        flags: The options of the compiler.
        runtimes: Libraries of the compiler's that come before all others of a process.
        options: Variables of the environment; `log_path` and suppressions are added to each.
        tests: The tests that run.
        planted: Functions in C++, each with a fault that is to be reported.
    """

    flags: tuple[str, ...]
    runtimes: tuple[str, ...]
    options: dict[str, str]
    tests: tuple[str, ...]
    planted: tuple[str, ...]


_PLAIN = ("-O1", "-g", "-fno-omit-frame-pointer")
SANITIZERS = {
    "address": Sanitizer(
        (*_PLAIN, "-fsanitize=address"),
        # The C++ runtime as well: else no exception could be thrown, since Python brings none along.
        ("libasan.so", "libstdc++.so"),
        {
            # Leaks: what lives as long as the process is never freed, by design, here and in PyTorch.
            # Mismatches of new and free, and variables that two libraries define: PyTorch's own.
            "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:new_delete_type_mismatch=0:"
            "detect_odr_violation=0",
        },
        ALL,
        ("int ltc_freed() { int* one = new int(7); delete one; return *(int volatile*)one; }",),
    ),
    # In a build of its own: beside AddressSanitizer it writes to no file, and pytest keeps what it says.
    "undefined": Sanitizer(
        (
            *_PLAIN, "-fsanitize=undefined",
            # A check of dynamic types asks for typeinfo that PyTorch's libraries keep to themselves. With those
            # of null pointers g++ takes no address of a function for a constant, as PyTorch's headers ask.
            "-fno-sanitize=vptr,null,nonnull-attribute,returns-nonnull-attribute",
        ),
        ("libubsan.so", "libstdc++.so"),
        {"UBSAN_OPTIONS": "print_stacktrace=1"},
        ALL,
        ("int ltc_beyond() { int volatile most = 2147483647; return most + 1; }",),
    ),
    "thread": Sanitizer(
        (*_PLAIN, "-fsanitize=thread"),
        ("libtsan.so", "libstdc++.so"),
        # Of a library that is not built so, locks are seen alone: Python's own orders whoever holds it.
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0:history_size=4"},
        THREADS,
        (
            "static int volatile ltc_word;"
            "int ltc_race() { std::thread other([] { ltc_word = 1; }); ltc_word = 2; other.join(); return ltc_word; }",
        ),
    ),
}  # fmt: skip
_OURS = re.compile(r"ltc/native/csrc|\bltc::|\bltc_\w+")


def build(sanitizer: Sanitizer, folder: Path) -> Path:
    """Build the core; raise SystemExit with what the compiler says where it fails."""
    library = folder / "core.so"
    complaint = core_build.compiled(library, sanitizer.flags)
    if complaint:
        raise SystemExit(complaint)
    return library


def runtime(name: str) -> str:
    """Return where the compiler has one of its libraries; raise SystemExit where it has not."""
    command = [str(core_build.compiler()), f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"{command[0]} has no {name}: install it, or name a compiler by CXX")
    return found


def run(sanitizer: Sanitizer, command: list[str], folder: Path, **variables: str) -> int:
    """Run Python beside the sanitizer's libraries; return its exit status."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    environment["LD_PRELOAD"] = " ".join(map(runtime, sanitizer.runtimes))
    for name, options in sanitizer.options.items():
        environment[name] = f"{options}:log_path={folder / 'report'}"
    command = [sys.executable, *command]
    if shutil.which("setarch"):  # the sanitizers' maps of memory want the system's usual places
        command = ["setarch", platform.machine(), "-R", *command]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def look_for_planted(sanitizer: Sanitizer, folder: Path) -> None:
    """Raise SystemExit unless each planted fault is reported by a process that runs as tests do."""
    library = str(folder / "planted.so")
    for fault in sanitizer.planted:
        command = [str(core_build.compiler()), *sanitizer.flags, *"-shared -fPIC -x c++ -".split()]
        source = f'#include <thread>\nextern "C" {{ {fault} }}\n'
        subprocess.run([*command, "-o", library], input=source, text=True, check=True)
        name = re.findall(r"int (ltc_\w+)\(", fault)[-1]
        run(sanitizer, ["-c", f"import ctypes; ctypes.CDLL({library!r}).{name}()"], folder)
        if not any(name in one for one in reports(folder)):
            raise SystemExit(f"nothing is looked at: no report names {name}, which has a fault")
        forget_reports(folder)


def forget_reports(folder: Path) -> None:
    for file in folder.glob("report*"):
        file.unlink()


def reports(folder: Path) -> Iterator[str]:
    """Yield each report that names the core's sources or functions."""
    for file in sorted(folder.glob("report*")):
        text = file.read_text(errors="replace")
        for one in re.split(r"(?m)^(?==+\d*\s*(?:ERROR|WARNING)|=+$|.*runtime error:)", text):
            if _OURS.search(one):
                yield one.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sanitizers", nargs="*", help=f"of {', '.join(SANITIZERS)}; all if none")
    parser.add_argument("--tests", nargs="+", help="in place of those that are listed here")
    parser.add_argument("--keep", type=Path, help="a folder for builds and reports, which are kept")
    given = parser.parse_args()
    failed = False
    for name in given.sanitizers or SANITIZERS:
        sanitizer = SANITIZERS[name]
        with tempfile.TemporaryDirectory(prefix="ltc-sanitizer-") as temporary:
            folder = Path(temporary) if given.keep is None else given.keep.absolute() / name
            folder.mkdir(parents=True, exist_ok=True)
            forget_reports(folder)
            look_for_planted(sanitizer, folder)
            library = build(sanitizer, folder)
            tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
            tests += given.tests or sanitizer.tests
            used = {core_build.TRIED: str(library), "LTC_CACHE_DIR": str(folder / "cache")}
            status = run(sanitizer, tests, folder, **used)
            found = list(reports(folder))
        print(*found, sep="\n\n")
        print(f"{name}: {len(found)} reports name the core; pytest's exit status is {status}")
        failed |= bool(found) or status != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
