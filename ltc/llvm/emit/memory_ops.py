"""Vectors to and from memory, elements side by side or anywhere, all of them or those of a mask.

A vector has `b.width` elements of the scalar type that they are stored as.
"""

from __future__ import annotations

from ltc.llvm.emit.builder import Builder, multiples
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index

CACHE_LINE = 64  # bytes


def load(b: Builder, address: str, element: str, mask: str | None = None) -> str:
    """Neighbouring elements; zero where the mask is not set."""
    type, size = b.of(element), BYTES[element]
    if mask is None:
        return b.effect(f"load {type}, ptr {address}, align {size}")
    function = f"llvm.masked.load.{b.suffix(element)}.p0"
    b.declare(function, type, "ptr", "i32", b.of("i1"), type)
    return b.effect(
        f"call {type} @{function}(ptr {address}, i32 {size}, {b.of('i1')} {mask}, "
        f"{type} zeroinitializer)"
    )


def store(b: Builder, value: str, address: str, element: str, mask: str | None = None) -> None:
    """The counterpart of `load`; where the mask is not set, memory stays as it is."""
    type, size = b.of(element), BYTES[element]
    if mask is None:
        b.emit(f"store {type} {value}, ptr {address}, align {size}")
        return
    if mask == first_lanes(b, 1):  # LLVM 22 would store a truncated lane at its full size
        lane = b.value(f"extractelement {type} {value}, i64 0")
        b.emit(f"store {element} {lane}, ptr {address}, align {size}")
        return
    function = f"llvm.masked.store.{b.suffix(element)}.p0"
    b.declare(function, "void", type, "ptr", "i32", b.of("i1"))
    b.emit(f"call void @{function}({type} {value}, ptr {address}, i32 {size}, {b.of('i1')} {mask})")


def stream(b: Builder, value: str, address: str, element: str) -> None:
    """A vector to memory past the caches, at a multiple of its size or of a cache line's."""
    align = min(b.width * BYTES[element], CACHE_LINE)
    b.passes_caches = True
    b.emit(f"store {b.of(element)} {value}, ptr {address}, align {align}, !nontemporal !0")


def gather(b: Builder, pointers: str, element: str, mask: str | None = None) -> str:
    """The elements at a vector of addresses; zero where the mask is not set."""
    type = b.of(element)
    function = f"llvm.masked.gather.{b.suffix(element)}.v{b.width}p0"
    b.declare(function, type, b.of("ptr"), "i32", b.of("i1"), type)
    mask = mask or b.constant("i1", True)
    return b.effect(
        f"call {type} @{function}({b.of('ptr')} {pointers}, i32 {BYTES[element]}, "
        f"{b.of('i1')} {mask}, {type} zeroinitializer)"
    )


def scatter(b: Builder, value: str, pointers: str, element: str, mask: str | None = None) -> None:
    """The counterpart of `gather`; where the mask is not set, memory stays as it is."""
    type = b.of(element)
    function = f"llvm.masked.scatter.{b.suffix(element)}.v{b.width}p0"
    b.declare(function, "void", type, b.of("ptr"), "i32", b.of("i1"))
    mask = mask or b.constant("i1", True)
    b.emit(
        f"call void @{function}({type} {value}, {b.of('ptr')} {pointers}, i32 {BYTES[element]}, "
        f"{b.of('i1')} {mask})"
    )


def addresses(b: Builder, pointer: str, positions: str, element: str, word: str = "i64") -> str:
    """Return the addresses of elements at a vector of positions, which are numbers of the type
    `word`.
    """
    return b.value(f"getelementptr {element}, ptr {pointer}, {b.of(word)} {positions}")


def first_lanes(b: Builder, count: Index) -> str | None:
    """The mask of the first `count` lanes; None where those are all."""
    if not isinstance(count, int):
        numbers = multiples(b.width, 1, "i64")
        return b.compare("slt", "i64", numbers, b.splat("i64", count))
    if count >= b.width:
        return None
    return f"<{', '.join(f'i1 {str(k < count).lower()}' for k in range(b.width))}>"
