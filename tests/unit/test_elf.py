"""Machine code that is put into memory without LLVM."""

import ctypes
import gc
import math
import os
import platform
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from ltc import config
from ltc.debug import metrics
from ltc.errors import CodeRefused, Unsupported
from ltc.llvm.compiler import llvm_binding, object_loader, symbols
from ltc.llvm.native import kernel_cache

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other machines load by LLVM"
)

COUNTED = """
@calls = internal global i64 40, align 8
@zeros = internal global [3 x i64] zeroinitializer, align 64
define i64 @count() {
  %old = load i64, ptr @calls
  %zero = load i64, ptr @zeros
  %more = add i64 %old, 1
  %new = add i64 %more, %zero
  store i64 %new, ptr @calls
  ret i64 %new
}
"""
CALLING = """
declare double @exp(double)
define double @shifted(double %x) {
  %y = call double @exp(double %x)
  %z = fadd double %y, 2.5
  ret double %z
}
define double @twice(double %x) {
  %y = call double @shifted(double %x)
  %z = fmul double %y, 2.0
  ret double %z
}
"""
MISSING = """
declare void @no.such.function()
define void @calls.it() {
  call void @no.such.function()
  ret void
}
"""


def compiled(text: str) -> bytes:
    return llvm_binding.compiler().object_code(text)


def loaded(names: list[str], *texts: str) -> object_loader.Code:
    parts = [object_loader.Object(compiled(text)) for text in texts]
    return object_loader.load(parts, names, symbols.address_of)


def test_functions_call_others_and_find_their_constants():
    code = loaded(["twice"], CALLING)
    twice = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(code.addresses["twice"])
    assert twice(0.5) == 2 * (math.exp(0.5) + 2.5)


def test_data_begins_as_written_and_can_be_written_to():
    code = loaded(["count", "shifted"], CALLING, COUNTED)
    count = ctypes.CFUNCTYPE(ctypes.c_int64)(code.addresses["count"])
    assert [count(), count()] == [41, 42]


def test_two_copies_share_no_data():
    codes = [loaded(["count"], COUNTED) for _ in range(2)]
    count, other = [ctypes.CFUNCTYPE(ctypes.c_int64)(code.addresses["count"]) for code in codes]
    assert [count(), count(), other()] == [41, 42, 41]


def test_code_can_not_be_written_to_and_data_does_not_run():
    code = loaded(["count"], COUNTED)
    assert permissions(code.memory.address) == "r-xp"
    assert permissions(code.memory.address + 2 * 4096 - 1).startswith("rw-")


def test_the_memory_goes_with_its_last_holder():
    code = loaded(["count"], COUNTED)
    address = code.memory.address
    assert permissions(address)
    del code
    gc.collect()
    assert permissions(address) != "r-xp"


def test_a_function_in_no_library_is_told_by_name():
    with pytest.raises(Unsupported, match="no.such.function"):
        loaded(["calls.it"], MISSING)


def test_objects_of_other_machines_are_refused():
    code = bytearray(compiled(COUNTED))
    struct.pack_into("<H", code, 18, 183)  # AArch64
    with pytest.raises(Unsupported, match="another kind"):
        object_loader.Object(bytes(code))
    with pytest.raises(ValueError, match="this kind of processor"):
        llvm_binding.machine_code(bytes(code), "count")


@pytest.mark.parametrize("length", [0, 3, 63, 64, 100, 400, -1])
def test_an_object_that_is_cut_off_is_none(length):
    with pytest.raises((ValueError, IndexError, struct.error)):
        llvm_binding.machine_code(compiled(COUNTED)[:length], "count")


def test_an_object_without_the_function_is_another_one():
    with pytest.raises(ValueError, match="without shifted"):
        llvm_binding.machine_code(compiled(COUNTED), "shifted")


def test_what_is_not_known_here_is_loaded_by_llvm(monkeypatch):
    def refuses(*_):
        raise Unsupported("not here")

    monkeypatch.setattr(object_loader, "load", refuses)
    before = metrics.counter_value("llvm.linked") or 0
    library = llvm_binding.link([llvm_binding.machine_code(compiled(COUNTED))], ["count"])
    assert metrics.counter_value("llvm.linked") == before + 1
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(library.addresses["count"])() == 41


def permissions(address: int) -> str:
    """Of the pages that hold an address; "" where there are none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        pages, allowed, *_ = line.split()
        first, stop = (int(end, 16) for end in pages.split("-"))
        if first <= address < stop:
            return allowed
    return ""


def refusing(*_) -> int:
    return -1


def test_a_system_that_refuses_code_damages_no_cache(tmp_path, monkeypatch):
    """Whole objects stay on disk where it is the system that does not run them."""
    text = COUNTED.replace("@count()", "@kernel()")
    kernels = {kernel_cache.kernel_name(text): text}
    with config.override(LTC_CACHE_DIR=str(tmp_path / "cache")):
        kernel_cache.load(kernels)
        kept = sorted(path.name for path in (tmp_path / "cache").iterdir())
        gc.collect()
        with monkeypatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("error")
            patched.setattr(object_loader._libc(), "mprotect", refusing)
            assert not object_loader.is_code_allowed()
            for load in (kernel_cache.load, kernel_cache.load_from_disk):
                with pytest.raises(CodeRefused, match="forbids executable memory"):
                    load(kernels)
        assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == kept
        assert kernel_cache.load_from_disk(kernels)


HARDENED = """
import ctypes, sys, warnings
REFUSE_NEW_CODE = 65, 1, 0, 0, 0  # prctl's PR_SET_MDWE with PR_MDWE_REFUSE_EXEC_GAIN
if ctypes.CDLL(None).prctl(*REFUSE_NEW_CODE):
    sys.exit(77)
import torch, ltc
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    x = torch.arange(6.0).reshape(2, 3)
    for _ in range(3):
        y = (x.to("ltc") @ x.t().to("ltc")).exp().sum()
        ltc.sync()
    assert torch.allclose(y.cpu(), (x @ x.t()).exp().sum())
print(*[one.message for one in told], sep="\\n")
"""


def test_where_no_code_may_be_made_the_reference_computes_with_one_warning(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", HARDENED], capture_output=True, text=True, timeout=600,
        env={**os.environ, "LTC_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    if found.returncode == 77:
        pytest.skip("this kernel refuses no code: before Linux 6.3")
    assert found.returncode == 0, found.stderr
    (line,) = found.stdout.splitlines()
    assert line.startswith("This system forbids executable memory")
