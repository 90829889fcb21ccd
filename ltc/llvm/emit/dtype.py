"""The form of each dtype in memory, and in computations inside a kernel.

f16 and bf16 are computed in float, every result rounded to the dtype at once, so that a chain of
operations has the bits of one torch call for each; bool is a byte in memory and i1 in a register.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Form:
    """One dtype as LLVM sees it.

    Attributes:
        stored: The type of an element in memory.
        computed: The type of a value in a register.
        bytes: The size of an element in memory.
        kind: "float", "signed", "unsigned" or "bool".
    """

    stored: str
    computed: str
    bytes: int
    kind: str

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_rounded(self) -> bool:
        """Return True if results must be rounded to fewer bits than they are computed in."""
        return self.is_float and self.stored != self.computed


FORMS: dict[torch.dtype, Form] = {
    torch.float64: Form("double", "double", 8, "float"),
    torch.float32: Form("float", "float", 4, "float"),
    torch.float16: Form("half", "float", 2, "float"),
    torch.bfloat16: Form("i16", "float", 2, "float"),
    torch.int64: Form("i64", "i64", 8, "signed"),
    torch.int32: Form("i32", "i32", 4, "signed"),
    torch.int16: Form("i16", "i16", 2, "signed"),
    torch.int8: Form("i8", "i8", 1, "signed"),
    torch.uint8: Form("i8", "i8", 1, "unsigned"),
    torch.bool: Form("i8", "i1", 1, "bool"),
}


# Of each scalar type in memory.
BYTES = {"float": 4, "double": 8, "half": 2, "i8": 1, "i16": 2, "i32": 4, "i64": 8}


def literal(value: float | int | bool, computed: str) -> str:
    """A scalar constant of a register type; floats are rounded to float first where they are."""
    if computed == "double":
        return _double_text(float(value))
    if computed == "float":
        return _double_text(rounded_to_float(float(value)))
    if computed == "i1":
        return "true" if value else "false"
    bits = int(computed[1:])
    wrapped = int(value) & ((1 << bits) - 1)
    return str(wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped)


def rounded_to_float(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:  # struct refuses what rounds to infinity
        return float("inf") if value > 0 else float("-inf")


def _double_text(value: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
