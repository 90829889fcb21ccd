"""Run torch's own device-generic tests on ltc, and print what fails and why.

    python scripts/compare/torch_device_tests.py                    # the tables of the installed torch
    python scripts/compare/torch_device_tests.py --clone            # PyTorch's test files as well
    python scripts/compare/torch_device_tests.py --tests FOLDER     # test files that are here already
    python scripts/compare/torch_device_tests.py -k Linear          # tests with such names

The wheel of torch has its tables of modules and optimizers, with which device_generic_cases.py tests. Its test
files are in PyTorch's repository alone: --clone gets those of the installed version into a temporary folder.
Each file runs in a process of its own, its device-generic classes alone. What fails runs once more on the CPU: a
test that fails there as well is of another version of torch, or of another machine. `KNOWN` has the reasons of
the others. Exits with 1 if a test fails for none of them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch

HERE = Path(__file__).parent
OWN = HERE / "device_generic_cases.py"
REPOSITORY = "https://github.com/pytorch/pytorch"
FILES = (
    "test_torch.py", "test_nn.py", "test_optim.py", "test_autograd.py", "test_modules.py",
    "test_indexing.py", "test_view_ops.py", "test_type_promotion.py", "test_tensor_creation_ops.py",
    "test_shape_ops.py", "test_sort_and_select.py", "test_scatter_gather_ops.py", "test_reductions.py",
)  # fmt: skip
_STORAGE = "a lazy tensor has no storage to look at"
_LAYOUT = "a result has the strides of a contiguous tensor, and no memory format"
_OVERLAP = "a write that overlaps what it reads is computed, not refused"
_WORDS = "the same error in other words"
_ROWS = "the test lists devices by name, and this one is not among them"
_ON_CPU_TOO = "fails on the CPU as well: another version of torch, or this machine"
# Parts of a test's name or message -> the reason; docs/api.md has each under "Differences from PyTorch".
KNOWN: dict[str, str] = {
    "has no storage to read": _STORAGE, "storage_meta": _STORAGE, "tensor_from_storage": _STORAGE,
    "tensor_storage_type": _STORAGE, "deterministic_resize": _STORAGE, "lazy_clone": _STORAGE,
    "parallel_cow": _STORAGE, "to the storage of a view": _STORAGE, "getitem_copy_bools": _STORAGE,
    "contiguous": _LAYOUT, "memory_format": _LAYOUT, "noncontig": _LAYOUT, "discontig": _LAYOUT,
    "test_dim_function_empty": _LAYOUT, "test_multinomial_": _LAYOUT, "channels_last": _LAYOUT,
    "test_empty_slice": _LAYOUT,
    "mem_overlap": _OVERLAP,
    "test_copy_all_dtypes_and_devices": "copy.copy copies values",
    "test_deterministic_empty": "torch.empty gives zeros, also where memory is to be filled with NaN",
    "is only implemented on CPU tensors": "torch has map_ for the CPU alone",
    "local_scalar_dense_with_empty": _WORDS, "advancedindex_mixed_devices_error": _WORDS,
    "test_grad_scaler_deprecated_warning": _WORDS, "test_cpp_warnings_have_python_context": _WORDS,
    "test_nondeterministic_alert": _ROWS, "test_grad_scaling_state_dict": _ROWS,
    "sparse": "sparse tensors stay on the CPU",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A test that ran: "passed", "failed" or "skipped", and the first line of its message.

    Attributes:
        on_cpu: True if it failed on the CPU as well.
    """

    name: str
    status: str
    message: str = ""
    on_cpu: bool = False

    @property
    def reason(self) -> str:
        """Return the reason of its failure; "" where none is known."""
        if self.on_cpu:
            return _ON_CPU_TOO
        text = f"{self.name} {self.message}"
        return next((why for part, why in KNOWN.items() if part in text), "")


def cloned(folder: Path) -> Path:
    """Get the test files of the installed version; return their folder."""
    version = torch.__version__.partition("+")[0]
    target = folder / "pytorch"
    clone = ["git", "clone", "--depth", "1", "--filter=blob:none", "--sparse"]
    subprocess.run([*clone, "--branch", f"v{version}", REPOSITORY, target], check=True)
    subprocess.run(["git", "-C", target, "sparse-checkout", "set", "test"], check=True)
    return target / "test"


def run_file(file: Path, words: str) -> list[Case]:
    """Run the device-generic tests of a file; those that fail run on the CPU as well."""
    ours = "(LTC or PRIVATEUSE1)"
    cases = run_pytest(file, "privateuse1", f"{ours} and ({words})" if words else ours)
    names = {_of_cpu(one.name): one for one in cases if one.status == "failed"}
    if not names:
        return cases
    short = sorted({name.partition(".")[2] for name in names})
    again = run_pytest(file, "cpu", f"CPU and ({' or '.join(short)})")
    there = {one.name for one in again if one.status == "failed"}
    both = {one.name for name, one in names.items() if name in there}
    return [replace(one, on_cpu=one.name in both) for one in cases]


def _of_cpu(name: str) -> str:
    """Return the name that a test has on the CPU."""
    return re.sub("LTC|PRIVATEUSE1", "CPU", name).replace("_ltc", "_cpu")


def run_pytest(file: Path, device: str, words: str) -> list[Case]:
    """Run tests of a file in a process of its own; one that ends it, too, is a test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", folder,
            "-p", "ltc.errors",  # imports ltc first: torch's tests look for devices when they are imported
            "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={report}",
            "-k", words, str(file), *(["-n", "1"] if find_spec("xdist") else []),
        ]  # fmt: skip
        environment = os.environ | {
            "PYTORCH_TESTING_DEVICE_ONLY_FOR": device, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"
        }  # fmt: skip
        done = subprocess.run(
            command, env=environment, cwd=file.parent, capture_output=True, text=True
        )
        if not report.is_file():
            return [Case(file.name, "failed", (done.stderr or done.stdout).strip()[-300:])]
        return list(_cases(report))


def _cases(report: Path) -> Iterator[Case]:
    for one in ElementTree.parse(report).getroot().iter("testcase"):
        fault = next((part for part in one if part.tag in ("failure", "error")), None)
        name = f"{one.get('classname', '').rpartition('.')[2]}.{one.get('name')}"
        if fault is not None:
            message = (fault.get("message") or "").strip().splitlines() or [""]
            yield Case(name, "failed", message[0][:200])
        else:
            is_skipped = any(part.tag == "skipped" for part in one)
            yield Case(name, "skipped" if is_skipped else "passed")


def told(cases: list[Case]) -> None:
    """Print the counts, and failures grouped by their messages."""
    counts = Counter(one.status for one in cases)
    print(", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped")))
    groups: defaultdict[str, list[Case]] = defaultdict(list)
    for one in cases:
        if one.status == "failed":
            groups[one.reason or re.sub(r"\d+", "N", one.message)].append(one)
    for why, found in sorted(groups.items(), key=lambda group: -len(group[1])):
        kind = "known" if found[0].reason else "FAILED"
        print(f"{kind} {len(found):5d}  {why}\n              {found[0].name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=Path, help="folder of PyTorch's test files")
    parser.add_argument("--clone", action="store_true", help="get them, into a temporary folder")
    parser.add_argument("--files", nargs="*", help="their names, in place of the usual ones")
    parser.add_argument("-k", dest="words", default="", help="run tests with such names alone")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tests = cloned(Path(folder)) if asked.clone else asked.tests
        files = [OWN, *([tests / name for name in asked.files or FILES] if tests else [])]
        cases = []
        for file in files:
            print(f"{file.name}:", end=" ", flush=True)
            found = run_file(file, asked.words)
            told(found)
            cases += found
    return 1 if any(one.status == "failed" and not one.reason for one in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
