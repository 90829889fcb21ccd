"""A kernel that fills memory with values that no program computes, and checks if they changed.

Rows of a table say what to do, so that a program with many checks stays small.

A *poison* is a 64-bit word for each dtype, repeated. Each dtype has two: a kernel that reads unwritten
memory computes different results over the two.

The first is a signalling NaN in every float type. No word is one in all of them at once: what
signals in 16 bits is, as the upper half of a wider float, quiet or a number. In an integer it is
far from any index, size or count. The second is an ordinary number in a float, so that a
comparison, which a NaN answers like any other, has another answer; a large negative one in an
integer; and False, where the first is True. All bytes of the two differ.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.index import Index, IndexRegister
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.loops.bounds_checks import NUMBER_BITS

WORD_BYTES = 8
# What a row does: see `Row`.
FILL, COPY, COMPARE, LOOK, DIGEST, VERIFY = range(6)
ROW_WORDS = 8
ROW_BITS = PLACE_BITS = 28  # of a fault word, above its number: which row found it, and where
_FACTOR = 0x5851_F42D_4C95_7F2D  # of a digest: odd, so that no single change is lost
_RESERVED = re.compile(r"= alloca \[(\d+) x (\w+)\]")
_BYTES = {"double": 8, "i64": 8, "float": 4, "i32": 4, "half": 2, "i16": 2, "bfloat": 2, "i8": 1}


def _repeated(element: int, nbytes: int) -> int:
    """A word of elements, as a signed number."""
    word = element.to_bytes(nbytes, "little") * (WORD_BYTES // nbytes)
    return int.from_bytes(word, "little", signed=True)


POISONS: dict[torch.dtype, tuple[int, int]] = {
    torch.float64: (_repeated(0x7FF5_A5A5_A5A5_A5A5, 8), _repeated(0x3FFA_5A5A_5A5A_5A5A, 8)),
    torch.float32: (_repeated(0x7FA5_A5A5, 4), _repeated(0x3FDA_5A5A, 4)),
    torch.float16: (_repeated(0x7DA5, 2), _repeated(0x3E5A, 2)),
    torch.bfloat16: (_repeated(0x7FA5, 2), _repeated(0x3FDA, 2)),
    torch.int64: (_repeated(0x7DA5_A5A5_A5A5_A5A5, 8), _repeated(0x825A_5A5A_5A5A_5A5A, 8)),
    torch.int32: (_repeated(0x7DA5_A5A5, 4), _repeated(0x825A_5A5A, 4)),
    torch.int16: (_repeated(0x7DA5, 2), _repeated(0x825A, 2)),
    torch.int8: (_repeated(0x7D, 1), _repeated(0x82, 1)),
    torch.uint8: (_repeated(0x7D, 1), _repeated(0x82, 1)),
    torch.bool: (_repeated(0x7D, 1), 0),
}


class CheckRow(NamedTuple):
    """One check of one stretch of memory, or of two.

    Attributes:
        action: FILL: all bytes become `number`, a word, again and again. LOOK: report the first
            byte that such a filling would change; `behind` is added. COPY: the stretch goes to the
            other place. COMPARE: report the first element that differs in the other place. DIGEST:
            a number that stands for the bytes goes to the word in the other place. VERIFY: report
            where it is no longer the number there.
        buffer, shift: The stretch's buffer, and the offset of the stretch in it in bytes.
        other, behind: The other place's buffer, and its offset in bytes.
        nbytes: The size of the stretch.
        number: The word of a filling; bytes of the elements that are compared.
        name: Number of the text that describes this stretch.
    """

    action: int
    buffer: Any
    shift: int
    other: Any
    behind: int
    nbytes: int
    number: int = 0
    name: int = 0


class MemoryFinding(NamedTuple):
    """The finding of a fault word: the row, and the byte or element."""

    row: int
    place: int


def finding(told: int) -> MemoryFinding:
    """`told`: a fault word without its number."""
    place = told & (1 << PLACE_BITS) - 1
    if place >> PLACE_BITS - 1:
        place -= 1 << PLACE_BITS
    return MemoryFinding(told >> PLACE_BITS & (1 << ROW_BITS) - 1, place)


@dataclass(frozen=True)
class CheckRows:
    """Rows of a program's table, as a kernel is told where they are."""

    first: int
    count: int


class Frame:
    """The words of a launch, in which a row finds addresses, as a kernel is told where they are."""


FRAME = Frame()


def rows_code(rows: CheckRows, fault: Any) -> KernelCode:
    """Does what the rows say; the fault tells what was found first.

    In memory a row is eight words: for a buffer stands the place of its address in the frame.
    """
    return KernelCode(_rows_text(), (rows, FRAME, fault), 1, numbers=(rows.count, rows.first))


def stack_code(nbytes: int, tasks: int, word: int) -> KernelCode:
    """Fill so much of the stack of each thread that takes a task: the next kernel's memory.

    With one thread that is sure; with more, one that slept may find its stack as it was.
    """
    return KernelCode(_stack_text(), (), tasks, numbers=(nbytes, word))


@functools.lru_cache(maxsize=1024)
def stack_bytes(text: str) -> int:
    """Return the bytes that the kernel of a text reserves on the stack."""
    found = _RESERVED.findall(text)
    return sum(int(count) * _BYTES[element] for count, element in found)


@functools.cache
def _stack_text() -> str:
    b = Builder(width=1)
    _fill(b, b.effect("alloca i8, i64 %n0, align 64"), "%n0", "%n1")
    return function_text("kernel", 0, b, numbers=2)


@functools.cache
def _rows_text() -> str:
    b = Builder(width=1)

    def one(i: IndexRegister, _) -> None:
        row = b.address("%p0", i * ROW_WORDS, "i64")
        words = [b.effect(f"load i64, ptr {b.address(row, k, 'i64')}") for k in range(ROW_WORDS)]
        action, buffer, shift, other, behind, nbytes, number, _name = words
        memory, there = _address(b, buffer, shift), _address(b, other, behind)

        def report(place: str) -> None:
            _report(b, i + b.number(1), place)

        def tell(first: str, told: Callable[[], str | int]) -> None:
            b.when(b.value(f"icmp sge i64 {first}, 0"), (), lambda: report(told()))

        def look() -> None:
            first = _first_difference(
                b, memory, nbytes,
                lambda i: number, lambda i, whole: _byte_of_word(b, i, whole, number),
            )  # fmt: skip
            tell(first, lambda: b.index(first) + b.index(behind))

        def compare() -> None:
            first = _first_difference(
                b, memory, nbytes,
                lambda i: b.effect(f"load i64, ptr {b.address(there, i, 'i64')}, align 1"),
                lambda i, whole: b.effect(f"load i8, ptr {b.address(there, i, 'i8')}"),
            )  # fmt: skip
            tell(first, lambda: b.value(f"udiv i64 {first}, {number}"))

        def copy() -> None:
            b.declare("llvm.memcpy.p0.p0.i64", "void", "ptr", "ptr", "i64", "i1")
            both = f"ptr {there}, ptr {memory}"
            b.emit(f"call void @llvm.memcpy.p0.p0.i64({both}, i64 {nbytes}, i1 false)")

        def digest() -> None:
            b.emit(f"store i64 {_digest(b, memory, nbytes)}, ptr {there}, align 8")

        def verify() -> None:
            expected = b.effect(f"load i64, ptr {there}, align 8")
            differs = b.value(f"icmp ne i64 {_digest(b, memory, nbytes)}, {expected}")
            b.when(differs, (), lambda: report("0"))

        actions = {
            FILL: lambda: _fill(b, memory, nbytes, number), COPY: copy, COMPARE: compare,
            LOOK: look, DIGEST: digest, VERIFY: verify,
        }  # fmt: skip
        for which, act in actions.items():
            b.when(b.value(f"icmp eq i64 {action}, {which}"), (), act)

    b.loop("0", "%n0", 1, (), one)
    return function_text("kernel", 3, b, numbers=2)


def _address(b: Builder, place: str, shift: str) -> str:
    """Return the address in the frame's word at a place, so many bytes on."""
    first = b.effect(f"load ptr, ptr {b.address('%p1', place, 'i64')}")
    return b.value(f"getelementptr i8, ptr {first}, i64 {shift}")


def _report(b: Builder, row: str, place: str) -> None:
    """Into the fault word, where nothing is told there yet."""
    most, least = (1 << PLACE_BITS - 1) - 1, -(1 << PLACE_BITS - 1)
    low = b.value(f"call i64 @llvm.smin.i64(i64 {place}, i64 {most})")
    place = b.value(f"call i64 @llvm.smax.i64(i64 {low}, i64 {least})")
    b.declare("llvm.smin.i64", "i64", "i64", "i64")
    b.declare("llvm.smax.i64", "i64", "i64", "i64")
    place = b.value(f"and i64 {place}, {(1 << PLACE_BITS) - 1}")
    told = b.value(f"or i64 {b.value(f'shl i64 {row}, {PLACE_BITS}')}, {place}")
    word = b.value(f"or i64 {b.value(f'shl i64 {told}, {NUMBER_BITS}')}, 1")
    before = b.effect("load i64, ptr %p2, align 8")
    is_first = b.value(f"icmp eq i64 {before}, 0")
    b.when(is_first, (), lambda: b.emit(f"store i64 {word}, ptr %p2, align 8"))


def _words_of(b: Builder, nbytes: str) -> tuple[Index, Index]:
    """(how many whole words so many bytes are, how many bytes those have)"""
    words = b.index(nbytes) // WORD_BYTES
    return words, words * WORD_BYTES


def _fill(b: Builder, memory: str, nbytes: str, number: str) -> None:
    words, whole = _words_of(b, nbytes)

    def fill_word(i: IndexRegister, _) -> None:
        b.emit(f"store volatile i64 {number}, ptr {b.address(memory, i, 'i64')}, align 1")

    def fill_byte(i: IndexRegister, _) -> None:
        byte = _byte_of_word(b, i, whole, number)
        b.emit(f"store volatile i8 {byte}, ptr {b.address(memory, i, 'i8')}")

    b.loop("0", words, 1, (), fill_word)
    b.loop(whole, nbytes, 1, (), fill_byte)


def _digest(b: Builder, memory: str, nbytes: str) -> str:
    """The value of a polynomial whose coefficients the bytes are."""
    words, whole = _words_of(b, nbytes)

    def next_of(carried: list[str], word: str) -> list[Index]:
        return [b.index(carried[0]) * _FACTOR + b.index(word)]

    def take_word(i: Index, carried: list[str]) -> list[Index]:
        address = b.address(memory, i, "i64")
        return next_of(carried, b.effect(f"load i64, ptr {address}, align 1"))

    def take_byte(i: Index, carried: list[str]) -> list[Index]:
        byte = b.effect(f"load i8, ptr {b.address(memory, i, 'i8')}")
        return next_of(carried, b.value(f"zext i8 {byte} to i64"))

    carried = b.loop("0", words, 1, [("i64", nbytes)], take_word)
    (digest,) = b.loop(whole, nbytes, 1, [("i64", carried[0])], take_byte)
    return digest


def _first_difference(
    b: Builder, memory: str, nbytes: str, expected_word: Callable[[str], str],
    expected_byte: Callable[[str, str], str],
) -> str:  # fmt: skip
    """Return the first byte that is not as expected; -1 if all are.

    Args:
        expected_word: Number of a word -> the word.
        expected_byte: (number of a byte, of the first one behind all whole words) -> the byte.
    """
    words, whole = _words_of(b, nbytes)
    b.declare("llvm.cttz.i64", "i64", "i64", "i1")

    def noted(differs: str, place: str, found: str) -> list[str]:
        is_first = b.value(f"and i1 {differs}, {b.value(f'icmp slt i64 {found}, 0')}")
        return [b.value(f"select i1 {is_first}, i64 {place}, i64 {found}")]

    def look_at_word(i: IndexRegister, carried: list[str]) -> list[str]:
        word = b.effect(f"load i64, ptr {b.address(memory, i, 'i64')}, align 1")
        bits = b.value(f"xor i64 {word}, {expected_word(i)}")
        low = b.value(f"call i64 @llvm.cttz.i64(i64 {bits}, i1 false)")
        place = i * WORD_BYTES + b.index(low) // 8
        return noted(b.value(f"icmp ne i64 {bits}, 0"), place, carried[0])

    def look_at_byte(i: IndexRegister, carried: list[str]) -> list[str]:
        byte = b.effect(f"load i8, ptr {b.address(memory, i, 'i8')}")
        differs = b.value(f"icmp ne i8 {byte}, {expected_byte(i, whole)}")
        return noted(differs, i, carried[0])

    (found,) = b.loop("0", words, 1, [("i64", "-1")], look_at_word)
    (found,) = b.loop(whole, nbytes, 1, [("i64", found)], look_at_byte)
    return found


def _byte_of_word(b: Builder, i: IndexRegister, whole: IndexRegister, number: str) -> str:
    """Byte number `i` of a word repeated; `whole`: of a byte with which it begins anew."""
    bits = (i - whole) * 8
    return b.value(f"trunc i64 {b.value(f'lshr i64 {number}, {bits}')} to i8")
