"""Kernels for AArch64, made here and run under emulation: those of the project's own unit tests.

    apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    python scripts/compare/aarch64_kernels.py [TEST ...]

The tests of products take a description of a processor, and run each kernel that is made for it. Here
that is AArch64's (NEON): LLVM makes its code, a process under qemu runs it, and the tests compare what
it computes as they do for this processor. PyTorch itself is not emulated. Every other kernel that the
tests compile is made for AArch64 as well, and verified by LLVM, but not run.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import mmap
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
TESTS = (
    "test_llvm_matmul.py", "test_llvm_attention.py", "test_llvm_convolution.py",
    "test_llvm_recurrence.py",
)  # fmt: skip
SYSTEM, PROCESSOR, FEATURES = "aarch64-unknown-linux-gnu", "cortex-a76", "+neon,+fullfp16"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
MEMORY_BYTES, PAGE = 1 << 30, 4096  # the file has no blocks where nobody writes


class Emulated:
    """The process under emulation, the memory it shares, and the libraries that it loads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, 0
        self.made: dict[str, bool] = {}  # by text: whether LLVM made an object of it
        runner = folder / "runner"
        source = str(HERE / "aarch64_runner.c")
        subprocess.run([COMPILER, "-O1", "-o", str(runner), source, "-ldl", "-lm"], check=True)
        with open(folder / "memory", "w+b") as file:
            file.truncate(MEMORY_BYTES)
            self._memory = mmap.mmap(file.fileno(), MEMORY_BYTES)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        command = [*EMULATOR, str(runner), str(folder / "memory"), str(MEMORY_BYTES)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, kernel: Any, isa: Any, *tensors: torch.Tensor, tasks: int = 3) -> None:
        """In the place of tests.unit.llvm_kernels.run."""
        places, end = {}, 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in places:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                # as far from a page's beginning as here: kernels may count on an alignment
                start = end + storage.data_ptr() % PAGE
                self._bytes[start : start + whole.numel()] = whole
                places[storage.data_ptr()] = start, whole
                end = (start + whole.numel() + 2 * PAGE - 1) // PAGE * PAGE
        words = [f"n{number}" for number in kernel.numbers]
        for tensor in reversed(tensors):
            first = tensor.untyped_storage().data_ptr()
            words.insert(0, f"p{places[first][0] + tensor.data_ptr() - first}")
        self._ask(f"{self._library(kernel.text)} {tasks} {len(words)} {' '.join(words)}\n")
        for start, whole in places.values():
            whole.copy_(self._bytes[start : start + whole.numel()])
        self.runs += 1

    def object_code(self, text: str) -> bytes:
        """Raises RuntimeError with LLVM's words where it refuses the text for this processor."""
        self.made[text] = False
        llvm, machine = _machine()
        with llvm.parse_assembly(text) as module:
            module.triple, module.data_layout = machine.triple, str(machine.target_data)
            module.verify()
            code: bytes = machine.emit_object(module)
        self.made[text] = True
        return code

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if answer != "done":
            raise RuntimeError(f"under emulation: {answer or 'the process has ended'}")

    def _library(self, text: str) -> Path:
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
        if not path.exists():
            code = path.with_suffix(".o")
            code.write_bytes(self.object_code(text))
            linked = [COMPILER, "-shared", "-o", str(path), str(code), "-lm"]
            subprocess.run(linked, check=True)
        return path


@functools.cache
def _machine() -> tuple[Any, Any]:
    """(llvmlite's binding, what makes code for AArch64)"""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(SYSTEM)
    machine = target.create_target_machine(
        cpu=PROCESSOR, features=FEATURES, opt=2, reloc="pic", codemodel="default"
    )
    return llvm, machine


def put_in_place(emulated: Emulated) -> None:
    """The tests take kernels for this processor, and run them there."""
    from ltc.llvm.compiler import llvm_binding
    from ltc.llvm.emit.isa import NEON
    from ltc.llvm.native.kernel_cache import Compiling
    from ltc.llvm.ops import dispatch
    from tests.unit import llvm_kernels

    llvm_kernels.HOST, llvm_kernels.ISAS, llvm_kernels.run = NEON, [NEON], emulated.run
    begin = Compiling.begin

    def begin_both(self: Compiling, name: str, text: str) -> None:
        try:
            emulated.object_code(text)
        except RuntimeError as error:
            print(f"LLVM refuses for AArch64: {error}\n{text[:2000]}", file=sys.stderr)
        begin(self, name, text)

    Compiling.begin = begin_both
    host = llvm_binding.host()
    made_for = {f"+{name.lstrip('+')}" for name in FEATURES.split(",")}
    llvm_binding.has_feature = lambda name: f"+{name}" in made_for
    dispatch.isa = lambda: NEON
    print(f"kernels for {PROCESSOR}, {FEATURES}, run on {host.cpu} by {EMULATOR[0]}")


class Plugin:
    """Tests that speak of this processor by name have nothing to say of another."""

    def pytest_collection_modifyitems(self, items: list) -> None:
        for item in items:
            if "processor" in item.name or "host" in item.name:
                item.add_marker(pytest.mark.skip(reason="of the processor that tests run on"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "tests", nargs="*", help="pytest's arguments; default: the tests of products"
    )
    options = parser.parse_args()
    root = HERE.parents[1]
    sys.path.insert(0, str(root))
    with tempfile.TemporaryDirectory() as folder:
        emulated = Emulated(Path(folder))
        try:
            put_in_place(emulated)
            tests = options.tests or [str(root / "tests" / "unit" / name) for name in TESTS]
            status = pytest.main(["-q", *tests], plugins=[Plugin()])
        finally:
            emulated.end()
        refused = sum(not made for made in emulated.made.values())
        print(
            f"{len(emulated.made)} kernels made for AArch64, {refused} refused; "
            f"{emulated.runs} launches under emulation"
        )
    return bool(status or refused)


if __name__ == "__main__":
    sys.exit(main())
