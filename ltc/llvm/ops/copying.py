"""One buffer copied to another, or filled with one element."""

from __future__ import annotations

import torch

from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.support.sizes.choices import least, most

BYTES_OF_A_TASK = 1 << 18
MOST_TASKS = 64
VECTOR = 16


def task_count(nbytes: int) -> int:
    return most(1, least(MOST_TASKS, nbytes // BYTES_OF_A_TASK))


def copy_code(source, result, count: int, dtype: torch.dtype) -> KernelCode:
    """`count` elements of source to result; nothing where both are one buffer."""
    nbytes = FORMS[dtype].bytes
    b = Builder()
    first, length = _share(b, nbytes)

    def copy() -> None:
        _call(b, "llvm.memcpy.p0.p0.i64", "ptr", b.address("%p0", first, "i8"), first, length)

    b.when(b.value("icmp ne ptr %p0, %p1"), (), copy)
    text = function_text("kernel", 2, b, numbers=1)
    return KernelCode(text, (source, result), task_count(count * nbytes), numbers=(count,))


def fill_code(element, result, count: int, dtype: torch.dtype) -> KernelCode:
    """`count` times the one element of a buffer; all its bits, so -0.0 stays what it is."""
    form = FORMS[dtype]
    b = Builder()
    word = f"i{8 * form.bytes}"
    first, length = _share(b, 1)
    value = b.effect(f"load {word}, ptr %p0, align {form.bytes}")
    is_zero = b.value(f"icmp eq {word} {value}, 0")

    def clear() -> None:
        nbytes = length * form.bytes
        _call(b, "llvm.memset.p0.i64", "i8", "0", first * form.bytes, nbytes)

    def fill() -> None:
        with b.lanes(VECTOR):
            vector = b.splat(word, value)
        whole = b.index(b.value(f"and i64 {length}, -{VECTOR}"))
        limit, end = first + whole, first + length
        type = f"<{VECTOR} x {word}>"

        def several(i: Index, _) -> None:
            b.emit(f"store {type} {vector}, ptr {b.address('%p1', i, word)}, align {form.bytes}")

        def one(i: Index, _) -> None:
            b.emit(f"store {word} {value}, ptr {b.address('%p1', i, word)}, align {form.bytes}")

        b.loop(first, limit, VECTOR, (), several)
        b.loop(limit, end, 1, (), one)

    b.when(is_zero, (), clear)
    b.when(b.value(f"xor i1 {is_zero}, true"), (), fill)
    text = function_text("kernel", 2, b, numbers=1)
    return KernelCode(text, (element, result), task_count(count * form.bytes), numbers=(count,))


def _share(b: Builder, nbytes: int) -> tuple[Index, Index]:
    """Return where this task begins and how long it is, in units of `nbytes` bytes each."""
    low, high = (unit * nbytes for unit in b.share(b.number(0)))
    return low, high - low


def _call(b: Builder, function: str, type: str, source: str, first: Index, nbytes: Index) -> None:
    """memcpy or memset of `nbytes` bytes to the result's byte `first`."""
    b.declare(function, "void", "ptr", type, "i64", "i1")
    target = b.address("%p1", first, "i8")
    b.emit(f"call void @{function}(ptr {target}, {type} {source}, i64 {nbytes}, i1 false)")
