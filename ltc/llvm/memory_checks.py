"""Kernels that fill memory with what nobody would compute, and look whether it changed.

A *poison* is a 64-bit word for each dtype, over and over. Each dtype has two: what a kernel makes
of memory that nobody wrote differs from the one to the other.

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
from typing import Any

import torch

from ltc.llvm.builder import Builder, function_text
from ltc.llvm.checks import NUMBER_BITS
from ltc.llvm.code import KernelCode

WORD_BYTES = 8
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


def fill_code(buffer: Any, shift: int, nbytes: int, word: int) -> KernelCode:
    """`nbytes` bytes, from `shift` behind the buffer's first, become the word again and again."""
    return KernelCode(_fill_text(), (buffer,), 1, (shift,), (nbytes, word))


def stack_code(nbytes: int, tasks: int, word: int) -> KernelCode:
    """So much of the stack of each thread that takes a task is filled: the next kernel's memory.

    With one thread that is sure; with more, one that slept may find its stack as it was.
    """
    return KernelCode(_stack_text(), (), tasks, numbers=(nbytes, word))


@functools.lru_cache(maxsize=1024)
def stack_bytes(text: str) -> int:
    """What the kernel of a text reserves on the stack for itself."""
    found = _RESERVED.findall(text)
    return sum(int(count) * _BYTES[element] for count, element in found)


def copy_code(source: Any, target: Any, nbytes: int, shifts: tuple[int, int]) -> KernelCode:
    """`shifts`: bytes to add to the first of each."""
    return KernelCode(_copy_text(), (source, target), 1, shifts, (nbytes,))


def look_code(buffer: Any, shift: int, nbytes: int, word: int, fault: Any) -> KernelCode:
    """The fault is set where `fill_code` of the same arguments would change anything.

    What it tells is where, in bytes from the buffer's first.
    """
    return KernelCode(_look_text(), (buffer, fault), 1, (shift,), (nbytes, word, shift))


def compare_code(
    before: Any, shift: int, now: Any, nbytes: int, element_bytes: int, fault: Any
) -> KernelCode:
    """The fault is set where two buffers differ; what it tells is in which element.

    shift  bytes to add to the first of `before`
    """
    nodes = (before, now, fault)
    return KernelCode(_compare_text(), nodes, 1, (shift,), (nbytes, element_bytes))


def digest_code(buffer: Any, nbytes: int, target: Any, shift: int) -> KernelCode:
    """A number that stands for the bytes goes to a word, `shift` bytes behind `target`'s first."""
    return KernelCode(_digest_text(), (buffer, target), 1, (0, shift), (nbytes,))


def verify_code(buffer: Any, nbytes: int, source: Any, shift: int, fault: Any) -> KernelCode:
    """The fault is set where `digest_code` of the same arguments would now give another number."""
    return KernelCode(_verify_text(), (buffer, source, fault), 1, (0, shift), (nbytes,))


@functools.cache
def _fill_text() -> str:
    b = Builder(width=1)
    _fill(b, "%p0")
    return function_text("kernel", 1, b, numbers=2)


@functools.cache
def _stack_text() -> str:
    b = Builder(width=1)
    _fill(b, b.effect("alloca i8, i64 %n0, align 64"))
    return function_text("kernel", 0, b, numbers=2)


def _fill(b: Builder, memory: str) -> None:
    """%n0 bytes become %n1 again and again."""
    words = b.value(f"udiv i64 %n0, {WORD_BYTES}")
    whole = b.multiply(words, WORD_BYTES)

    def fill_word(i: str, _) -> None:
        b.emit(f"store volatile i64 %n1, ptr {b.address(memory, i, 'i64')}, align 1")

    def fill_byte(i: str, _) -> None:
        byte = _byte_of_word(b, i, whole)
        b.emit(f"store volatile i8 {byte}, ptr {b.address(memory, i, 'i8')}")

    b.loop("0", words, 1, (), fill_word)
    b.loop(whole, "%n0", 1, (), fill_byte)


@functools.cache
def _copy_text() -> str:
    b = Builder(width=1)
    b.declare("llvm.memcpy.p0.p0.i64", "void", "ptr", "ptr", "i64", "i1")
    b.emit("call void @llvm.memcpy.p0.p0.i64(ptr %p1, ptr %p0, i64 %n0, i1 false)")
    return function_text("kernel", 2, b, numbers=1)


@functools.cache
def _look_text() -> str:
    b = Builder(width=1)
    found = _first_difference(
        b, lambda i: "%n1", lambda i, whole: _byte_of_word(b, i, whole)
    )
    _report(b, found, "%p1", lambda: b.add(found, "%n2"))
    return function_text("kernel", 2, b, numbers=3)


@functools.cache
def _compare_text() -> str:
    b = Builder(width=1)
    found = _first_difference(
        b,
        lambda i: b.effect(f"load i64, ptr {b.address('%p1', i, 'i64')}, align 1"),
        lambda i, whole: b.effect(f"load i8, ptr {b.address('%p1', i, 'i8')}"),
    )
    _report(b, found, "%p2", lambda: b.value(f"udiv i64 {found}, %n1"))
    return function_text("kernel", 3, b, numbers=2)


@functools.cache
def _digest_text() -> str:
    b = Builder(width=1)
    b.emit(f"store i64 {_digest(b)}, ptr %p1, align 8")
    return function_text("kernel", 2, b, numbers=1)


@functools.cache
def _verify_text() -> str:
    b = Builder(width=1)
    expected = b.effect("load i64, ptr %p1, align 8")
    differs = b.value(f"icmp ne i64 {_digest(b)}, {expected}")
    b.when(differs, (), lambda: b.emit("store i64 1, ptr %p2, align 8"))
    return function_text("kernel", 3, b, numbers=1)


def _digest(b: Builder) -> str:
    """Of the %n0 bytes at %p0: the value of a polynomial whose coefficients they are."""
    words = b.value(f"udiv i64 %n0, {WORD_BYTES}")
    whole = b.multiply(words, WORD_BYTES)

    def next_of(carried: list[str], word: str) -> list[str]:
        return [b.value(f"add i64 {b.multiply(carried[0], _FACTOR)}, {word}")]

    def take_word(i: str, carried: list[str]) -> list[str]:
        return next_of(carried, b.effect(f"load i64, ptr {b.address('%p0', i, 'i64')}, align 1"))

    def take_byte(i: str, carried: list[str]) -> list[str]:
        byte = b.effect(f"load i8, ptr {b.address('%p0', i, 'i8')}")
        return next_of(carried, b.value(f"zext i8 {byte} to i64"))

    carried = b.loop("0", words, 1, [("i64", "%n0")], take_word)
    (digest,) = b.loop(whole, "%n0", 1, [("i64", carried[0])], take_byte)
    return digest


def _first_difference(
    b: Builder, expected_word: Callable[[str], str], expected_byte: Callable[[str, str], str]
) -> str:
    """Which of the %n0 bytes at %p0 is the first that is not as expected; -1 where all are.

    expected_word  number of a word -> the word
    expected_byte  (number of a byte, of the first one behind all whole words) -> the byte
    """
    words = b.value(f"udiv i64 %n0, {WORD_BYTES}")
    whole = b.multiply(words, WORD_BYTES)
    b.declare("llvm.cttz.i64", "i64", "i64", "i1")

    def noted(differs: str, place: str, found: str) -> list[str]:
        is_first = b.value(f"and i1 {differs}, {b.value(f'icmp slt i64 {found}, 0')}")
        return [b.value(f"select i1 {is_first}, i64 {place}, i64 {found}")]

    def look_at_word(i: str, carried: list[str]) -> list[str]:
        word = b.effect(f"load i64, ptr {b.address('%p0', i, 'i64')}, align 1")
        bits = b.value(f"xor i64 {word}, {expected_word(i)}")
        low = b.value(f"call i64 @llvm.cttz.i64(i64 {bits}, i1 false)")
        place = b.add(b.multiply(i, WORD_BYTES), b.value(f"udiv i64 {low}, 8"))
        return noted(b.value(f"icmp ne i64 {bits}, 0"), place, carried[0])

    def look_at_byte(i: str, carried: list[str]) -> list[str]:
        byte = b.effect(f"load i8, ptr {b.address('%p0', i, 'i8')}")
        differs = b.value(f"icmp ne i8 {byte}, {expected_byte(i, whole)}")
        return noted(differs, i, carried[0])

    (found,) = b.loop("0", words, 1, [("i64", "-1")], look_at_word)
    (found,) = b.loop(whole, "%n0", 1, [("i64", found)], look_at_byte)
    return found


def _byte_of_word(b: Builder, i: str, whole: str) -> str:
    """Byte number `i` of %n1 repeated; `whole`: of a byte with which it begins anew."""
    bits = b.multiply(b.value(f"sub i64 {i}, {whole}"), 8)
    return b.value(f"trunc i64 {b.value(f'lshr i64 %n1, {bits}')} to i8")


def _report(b: Builder, found: str, fault: str, told: Callable[[], str]) -> None:
    def report() -> None:
        word = b.value(f"or i64 {b.value(f'shl i64 {told()}, {NUMBER_BITS}')}, 1")
        b.emit(f"store i64 {word}, ptr {fault}, align 8")

    b.when(b.value(f"icmp sge i64 {found}, 0"), (), report)
