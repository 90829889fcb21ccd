"""float16 by integers, where a processor has no instruction for it: the same bits."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from ltc.llvm.compiler import llvm_binding

SCRIPT = """
import torch, ltc
from ltc.llvm.compiler import llvm_binding

def bits(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])

def moved(x, places):
    return (bits(x) + places).view(torch.float32)

every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
assert torch.equal(bits(every.to("ltc").float().cpu()), bits(every.float()))
# every border between two numbers of float16, and what lies beside it
exact = every.float()
near = [moved(exact, places) for places in (0, 1, -1, 0xFFF, 0x1000, 0x1001, 0x1FFF)]
drawn = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int64).to(torch.int32)
wide = torch.cat([*near, drawn.view(torch.float32)])
assert torch.equal(bits(wide.to("ltc").half().cpu()), bits(wide.half()))
# rounded on the way, and one by one
assert torch.equal(bits((every[:99].to("ltc") * 3 + 1).cpu()), bits(every[:99] * 3 + 1))
print(llvm_binding.has_feature("f16c"))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LTC_ISA chooses among x86-64's levels")
@pytest.mark.parametrize(("isa", "has_instruction"), [("avx2", True), ("sse4", False)])
def test_all_numbers_become_what_the_cpu_makes_of_them(isa, has_instruction):
    if not llvm_binding.has_feature({"avx2": "avx2", "sse4": "sse4.2"}[isa]):
        pytest.skip("this processor has less")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "LTC_ISA": isa},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout.split(), done.returncode) == ([str(has_instruction)], 0), done.stderr


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_half_takes_the_sign_of_a_double(count):
    """Of one element, LLVM rounded the double to a half by a function that is in no library."""
    x, y = torch.randn(2, count, dtype=torch.float64).unbind()
    for make in (
        lambda x, y: torch.copysign(x.half(), -1.0),
        lambda x, y: torch.copysign(x, y).half(),
        lambda x, y: torch.copysign(x.float(), y.float()).half(),
        lambda x, y: torch.atan2(torch.hypot(x.half(), y.half()), y.half()),
    ):
        found, expected = make(x.to("ltc"), y.to("ltc")).cpu(), make(x, y)
        torch.testing.assert_close(found, expected)
        assert torch.equal(found.signbit(), expected.signbit())
