"""Machine code that is put into memory without LLVM."""

import ctypes
import gc
import math
import platform
import struct
from pathlib import Path

import pytest

from ltc.debug import metrics
from ltc.errors import Unsupported
from ltc.llvm.compiler import llvm_binding, object_loader, symbols

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
    return object_loader.load([compiled(text) for text in texts], names, symbols.address_of)


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
        object_loader.load([bytes(code)], ["count"], symbols.address_of)


def test_what_is_not_known_here_is_loaded_by_llvm(monkeypatch):
    def refuses(*_):
        raise Unsupported("not here")

    monkeypatch.setattr(object_loader, "load", refuses)
    before = metrics.counter_value("llvm.linked") or 0
    library = llvm_binding.link([compiled(COUNTED)], ["count"])
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
