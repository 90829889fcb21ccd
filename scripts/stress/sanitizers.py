"""Run the native core's tests over builds that look at each access to memory.

    python scripts/stress/sanitizers.py [address] [thread] [--tests FILE ...] [--keep FOLDER]

`address` builds the core with AddressSanitizer and UndefinedBehaviorSanitizer, `thread` with
ThreadSanitizer; without either, both run in turns.  Only the core is built so: Python, PyTorch and
compiled programs are as they are, and what is silenced of them is listed below, each with its reason.
The exit status is 1 where a test fails, or a report names the core.
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
        silenced: Lines of the file of suppressions.
        tests: The tests that run.
    """

    flags: tuple[str, ...]
    runtimes: tuple[str, ...]
    options: dict[str, str]
    silenced: tuple[str, ...]
    tests: tuple[str, ...]


_PLAIN = ("-O1", "-g", "-fno-omit-frame-pointer")
SANITIZERS = {
    "address": Sanitizer(
        (
            *_PLAIN, "-fsanitize=address,undefined",
            # A check of dynamic types asks for typeinfo that PyTorch's libraries keep to themselves.
            "-fno-sanitize=vptr",
        ),
        # The C++ runtime as well: else no exception could be thrown, since Python brings none along.
        ("libasan.so", "libubsan.so", "libstdc++.so"),
        {
            # Leaks: what lives as long as the process is never freed, by design, here and in PyTorch.
            # Mismatches of new and free, and variables that two libraries define: PyTorch's own.
            "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:new_delete_type_mismatch=0:"
            "detect_odr_violation=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        (),
        ALL,
    ),
    "thread": Sanitizer(
        (*_PLAIN, "-fsanitize=thread"),
        ("libtsan.so", "libstdc++.so"),
        # Of a library that is not built so, no access is seen, nor what orders it but locks.
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0:history_size=4"},
        (
            # Python's own lock orders its threads by a condition and a mutex, which are seen, and
            # by atomic words of the interpreter, which are not.
            "called_from_lib:libpython",
            # Counts of references are atomic words in these libraries, which nobody sees.
            "called_from_lib:libtorch_cpu.so",
            "called_from_lib:libtorch_python.so",
            "called_from_lib:libc10.so",
            # OpenMP's team starts and ends by futexes.
            "called_from_lib:libgomp",
        ),
        THREADS,
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
    """Return where the compiler has one of its libraries."""
    command = [str(core_build.compiler()), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(sanitizer: Sanitizer, library: Path, tests: list[str], folder: Path) -> int:
    """Run the tests over a library; return pytest's exit status."""
    silenced = folder / "silenced.txt"
    silenced.write_text("\n".join(sanitizer.silenced) + "\n")
    environment = {**os.environ, core_build.TRIED: str(library), "PYTHONPATH": str(ROOT)}
    environment["LD_PRELOAD"] = " ".join(map(runtime, sanitizer.runtimes))
    environment["LTC_CACHE_DIR"] = str(folder / "cache")
    for name, options in sanitizer.options.items():
        environment[name] = f"{options}:log_path={folder / 'report'}:suppressions={silenced}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    if shutil.which("setarch"):  # the sanitizers' maps of memory want the system's usual places
        command = ["setarch", platform.machine(), "-R", *command]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def reports(folder: Path) -> Iterator[str]:
    """Yield each report that names the core's sources or functions."""
    for file in sorted(folder.glob("report*")):
        text = file.read_text(errors="replace")
        for one in re.split(r"(?m)^(?==+\d*\s*(?:ERROR|WARNING)|=+$|.*runtime error:)", text):
            if _OURS.search(one):
                yield one.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sanitizers", nargs="*", help=f"of {', '.join(SANITIZERS)}; both if none")
    parser.add_argument("--tests", nargs="+", help="in place of those that are listed here")
    parser.add_argument("--keep", type=Path, help="a folder for builds and reports, which are kept")
    given = parser.parse_args()
    failed = False
    for name in given.sanitizers or SANITIZERS:
        sanitizer = SANITIZERS[name]
        with tempfile.TemporaryDirectory(prefix="ltc-sanitizer-") as temporary:
            folder = Path(temporary) if given.keep is None else given.keep.absolute() / name
            folder.mkdir(parents=True, exist_ok=True)
            library = folder / "core.so"
            if not library.exists():
                build(sanitizer, folder)
            status = run(sanitizer, library, given.tests or list(sanitizer.tests), folder)
            found = list(reports(folder))
        print(*found, sep="\n\n")
        print(f"{name}: {len(found)} reports name the core; pytest's exit status is {status}")
        failed |= bool(found) or status != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
