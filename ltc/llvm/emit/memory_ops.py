"""Vectors to and from memory, elements side by side or anywhere, all of them or those of a mask."""

from __future__ import annotations

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.dtype import Form

CACHE_LINE = 64  # bytes


def load(b: Builder, address: str, form: Form, mask: str | None = None) -> str:
    """Neighbouring elements as they are stored, `b.width` of them; zero where the mask is not."""
    type = b.of(form.stored)
    if mask is None:
        return b.effect(f"load {type}, ptr {address}, align {form.bytes}")
    function = f"llvm.masked.load.{b.suffix(form.stored)}.p0"
    b.declare(function, type, "ptr", "i32", b.of("i1"), type)
    return b.effect(
        f"call {type} @{function}(ptr {address}, i32 {form.bytes}, {b.of('i1')} {mask}, "
        f"{type} zeroinitializer)"
    )


def store(b: Builder, stored: str, address: str, form: Form, mask: str | None = None) -> None:
    """The counterpart of `load`; where the mask is not set, memory stays as it is."""
    type = b.of(form.stored)
    if mask is None:
        b.emit(f"store {type} {stored}, ptr {address}, align {form.bytes}")
        return
    if mask == first_lanes(b, 1):  # LLVM 22 would store a truncated lane at its full size
        lane = b.value(f"extractelement {type} {stored}, i64 0")
        b.emit(f"store {form.stored} {lane}, ptr {address}, align {form.bytes}")
        return
    function = f"llvm.masked.store.{b.suffix(form.stored)}.p0"
    b.declare(function, "void", type, "ptr", "i32", b.of("i1"))
    b.emit(
        f"call void @{function}({type} {stored}, ptr {address}, i32 {form.bytes}, "
        f"{b.of('i1')} {mask})"
    )


def stream(b: Builder, stored: str, address: str, form: Form) -> None:
    """A vector to memory past the caches, at a multiple of its size or of a cache line's."""
    align = min(b.width * form.bytes, CACHE_LINE)
    b.passes_caches = True
    b.emit(
        f"store {b.of(form.stored)} {stored}, ptr {address}, align {align}, !nontemporal !0"
    )


def gather(b: Builder, pointer: str, positions: str, form: Form, mask: str | None = None) -> str:
    """The elements at a vector of positions, as they are stored; zero where the mask is not set."""
    type = b.of(form.stored)
    pointers = b.value(f"getelementptr {form.stored}, ptr {pointer}, {b.of('i64')} {positions}")
    function = f"llvm.masked.gather.{b.suffix(form.stored)}.v{b.width}p0"
    b.declare(function, type, b.of("ptr"), "i32", b.of("i1"), type)
    mask = mask or b.constant("i1", True)
    return b.effect(
        f"call {type} @{function}({b.of('ptr')} {pointers}, i32 {form.bytes}, "
        f"{b.of('i1')} {mask}, {type} zeroinitializer)"
    )


def scatter(
    b: Builder, stored: str, pointer: str, positions: str, form: Form, mask: str | None = None
) -> None:
    """The counterpart of `gather`; where the mask is not set, memory stays as it is."""
    type = b.of(form.stored)
    pointers = b.value(f"getelementptr {form.stored}, ptr {pointer}, {b.of('i64')} {positions}")
    function = f"llvm.masked.scatter.{b.suffix(form.stored)}.v{b.width}p0"
    b.declare(function, "void", type, b.of("ptr"), "i32", b.of("i1"))
    mask = mask or b.constant("i1", True)
    b.emit(
        f"call void @{function}({type} {stored}, {b.of('ptr')} {pointers}, i32 {form.bytes}, "
        f"{b.of('i1')} {mask})"
    )


def first_lanes(b: Builder, count: int) -> str | None:
    """The mask of the first `count` lanes; None where those are all."""
    if count >= b.width:
        return None
    return "<" + ", ".join(f"i1 {'true' if k < count else 'false'}" for k in range(b.width)) + ">"
