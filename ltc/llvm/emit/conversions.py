"""From an element in memory to the value it is computed with, and back."""

from __future__ import annotations

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.dtype import Form


def from_memory(b: Builder, form: Form, x: str) -> str:
    """What was loaded, as it is computed with."""
    if form.stored == form.computed:
        return x
    if form.kind == "bool":
        return b.compare("ne", "i8", x, b.constant("i8", 0))
    if form.stored == "half":
        return b.convert("fpext", "half", x, "float")
    wide = b.binary("shl", "i32", b.convert("zext", "i16", x, "i32"), b.constant("i32", 16))
    return b.convert("bitcast", "i32", wide, "float")


def to_memory(b: Builder, form: Form, x: str) -> str:
    """What is computed, as it is stored; floats are rounded already."""
    if form.stored == form.computed:
        return x
    if form.kind == "bool":
        return b.convert("zext", "i1", x, "i8")
    if form.stored == "half":
        return b.convert("fptrunc", "float", x, "half")
    bits = b.convert("bitcast", "float", x, "i32")
    return b.convert("trunc", "i32", b.binary("lshr", "i32", bits, b.constant("i32", 16)), "i16")
