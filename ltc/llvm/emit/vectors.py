"""Vectors of one element type in the text of a kernel: addresses, loads, stores and products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ltc.errors import Unsupported
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import Builder, multiples
from ltc.llvm.emit.conversions import from_memory, to_memory
from ltc.llvm.emit.dtype import BYTES, FORMS
from ltc.llvm.emit.float_ops import Floats
from ltc.llvm.emit.index import Index, IndexRegister
from ltc.llvm.emit.index import least as least_index
from ltc.llvm.emit.isa import Isa
from ltc.support.sizes.choices import by_sample, least, most
from ltc.support.sizes.extent import Extent

LONGEST_SUM = 128  # steps added one by one; a longer sum is a sum of such, which errs less

STACK_BYTES = 3 << 20  # threads are made with 8 MiB

# Computes what is stored in place of a vector of results: the builder, the vector, its flat row,
# its first column, and the mask of its lanes that exist, or None where all do.  One that reads
# memory may have `fetch(builder, row, column)`, which asks for it ahead, and say by `fetches` whether
# that is of use.
Epilogue = Callable[[Builder, str, Index, Index, str | None], str]


@dataclass(frozen=True)
class GeneratedKernel:
    """A module that defines `void @name(ptr arguments, i64 task, i64 tasks)`.

    Attributes:
        arguments: The meaning of each pointer, in order.
        tasks: Into how many tasks a launch should divide; the results do not depend on it.
        flops: Additions and multiplications of one launch.
        numbers: Its i64 arguments, %n0 and on.
        is_call: True if PyTorch's own kernel computes the product.
    """

    name: str
    text: str
    arguments: tuple[str, ...]
    tasks: int
    flops: int
    numbers: tuple[int, ...] = ()
    is_call: bool = False

    def called(self, *first: str) -> GeneratedKernel:
        """The same kernel, its first arguments by other names."""
        return replace(self, arguments=(*first, *self.arguments[len(first) :]))


class Vectors(Floats):
    """One vector register's worth of elements: in memory, and computed in float32 or float64.

    dtype   how the elements are stored; bfloat16 is computed in float32
    stored  its LLVM type
    width   elements in one vector
    """

    def __init__(self, builder: Builder, isa: Isa, dtype: torch.dtype):
        form = FORMS[dtype]
        super().__init__(builder, form.computed, isa.lanes(BYTES[form.computed]))
        self.isa, self.dtype, self.stored = isa, dtype, form.stored

    # --- addresses

    def at(self, pointer: str, offset: Index, element: str | None = None) -> str:
        if offset.__class__ is int and offset == 0:
            return pointer
        return self.builder.value(
            f"getelementptr {element or self.stored}, ptr {pointer}, i64 {offset}"
        )

    # --- masks

    def first(self, count: Index, width: int = 0) -> str | None:
        """The mask of the first `count` lanes; None where that is all of them."""
        with self.builder.lanes(width or self.width):
            return memory_ops.first_lanes(self.builder, count)

    def between(self, first: Index, limit: Index, stride: int = 1) -> str:
        """The mask of the lanes whose number, first + lane * stride, is in [0, limit)."""
        at, last = self.numbers(first, stride), self.splat(self.narrow(limit), "i32")
        return self.builder.value(f"icmp ult <{self.width} x i32> {at}, {last}")

    def numbers(self, first: Index, stride: Any = 1, element: str = "i32") -> str:
        """first, first + stride, ... of the lanes, of an integer type."""
        start = self.splat(self.narrow(first) if element == "i32" else first, element)
        if isinstance(stride, Extent):
            lanes, each = multiples(self.width, 1, element), self.splat(stride, element)
            steps: str = self.builder.value(f"mul <{self.width} x {element}> {lanes}, {each}")
        else:
            steps = multiples(self.width, stride, element)
        return self.builder.value(f"add <{self.width} x {element}> {start}, {steps}")

    def narrow(self, x: Index) -> str | int:
        """An i64 as an i32."""
        return x if isinstance(x, int) else self.builder.value(f"trunc i64 {x} to i32")

    def fetch(self, epilogue: Epilogue | None, row: Index, column: Index) -> None:
        """Asks memory for what the epilogue of a vector will read."""
        if ask := getattr(epilogue, "fetch", None):
            with self.builder.lanes(self.width):
                ask(self.builder, row, column)

    # --- values

    def splat(self, value: str | int, element: str = "", width: int = 0) -> str:
        """A vector whose lanes all are the scalar `value`."""
        with self.builder.lanes(width or self.width):
            return self.builder.splat(element or self.element, value)

    def raw_load(self, pointer: str, mask: str | None, element: str, width: int) -> str:
        """`width` stored elements, zero where the mask is off."""
        with self.builder.lanes(width):
            return memory_ops.load(self.builder, pointer, element, mask)

    def raw_store(self, value: str, pointer: str, mask: str | None, element: str, width: int):
        with self.builder.lanes(width):
            memory_ops.store(self.builder, value, pointer, element, mask)

    def load(self, pointer: str, offset: Index = 0, mask: str | None = None) -> str:
        """A vector of stored elements, widened to what they are computed in."""
        raw = self.raw_load(self.at(pointer, offset), mask, self.stored, self.width)
        return self._widened(raw, self.width)

    def store(self, value: str, pointer: str, offset: Index = 0, mask: str | None = None) -> None:
        """Store a vector, rounded to the stored type to nearest even."""
        raw = value if self.stored == self.element else self._rounded(value)
        self.raw_store(raw, self.at(pointer, offset), mask, self.stored, self.width)

    def gather(self, pointer: str, offsets: str, mask: str | None) -> str:
        """Stored elements at i32 offsets, widened; zero where the mask is off."""
        with self.builder.lanes(self.width):
            pointers = memory_ops.addresses(self.builder, pointer, offsets, self.stored, "i32")
            raw = memory_ops.gather(self.builder, pointers, self.stored, mask)
        return self._widened(raw, self.width)

    def masks_of(self, first: Index, stride: int, limit: Index) -> tuple[str, ...]:
        """Return the masks by which `strided` leaves out elements that are not in [0, limit)."""
        if stride == 2:
            second = first + self.width
            return self.between(first, limit), self.between(second, limit)
        return (self.between(first, limit, stride),)

    def strided(self, pointer: str, first: Index, stride: int, masks: tuple[str, ...]) -> str:
        """Stored elements first, first + stride, ..., widened; zero where `masks_of` says so."""
        if stride == 1:
            return self.load(pointer, first, masks[0])
        if stride == 2:  # two loads and a shuffle take a quarter of a gather's time
            n = self.width
            low = self.load(pointer, first, masks[0])
            high = self.load(pointer, first + n, masks[1])
            return shuffled(self.builder, self.vector, low, high, list(range(0, 2 * n, 2)))
        return self.gather(self.at(pointer, first), multiples(self.width, stride), masks[0])

    def scatter(self, value: str, pointer: str, offsets: str, mask: str | None) -> None:
        """Store a vector, rounded to the stored type, at i32 offsets."""
        raw = value if self.stored == self.element else self._rounded(value)
        with self.builder.lanes(self.width):
            pointers = memory_ops.addresses(self.builder, pointer, offsets, self.stored, "i32")
            memory_ops.scatter(self.builder, raw, pointers, self.stored, mask)

    def load_computed(self, pointer: str, offset: Index = 0, mask: str | None = None) -> str:
        """A vector of elements that are kept as they are computed."""
        return self.raw_load(self.at(pointer, offset, self.element), mask, self.element, self.width)

    def store_computed(self, value: str, pointer: str, offset: Index = 0) -> None:
        at = self.at(pointer, offset, self.element)
        self.raw_store(value, at, None, self.element, self.width)

    def scalar(self, pointer: str, offset: Index = 0) -> str:
        """One stored element, widened."""
        size = BYTES[self.stored]
        x = self.builder.effect(f"load {self.stored}, ptr {self.at(pointer, offset)}, align {size}")
        return self._widened(x, 1)

    def computed_scalar(self, pointer: str, offset: Index = 0) -> str:
        """One element that is kept as it is computed."""
        at = self.at(pointer, offset, self.element)
        return self.builder.effect(f"load {self.element}, ptr {at}, align {BYTES[self.element]}")

    def _widened(self, raw: str, width: int) -> str:
        """Stored elements as they are computed."""
        if self.stored == self.element:
            return raw
        with self.builder.lanes(width):
            return from_memory(self.builder, FORMS[self.dtype], raw)

    def _rounded(self, x: str) -> str:
        """float32 to 16 bits: nearest even, denormals kept; every NaN of bfloat16 is 0x7FC0."""
        n, value = self.width, self.builder.value
        if self.stored == "half":
            with self.builder.lanes(n):
                return to_memory(self.builder, FORMS[self.dtype], x)
        words = f"<{n} x i32>"
        bits = value(f"bitcast {self.vector} {x} to {words}")
        odd = value(f"and {words} {value(f'lshr {words} {bits}, splat (i32 16)')}, splat (i32 1)")
        bias = value(f"add {words} {odd}, splat (i32 32767)")
        high = value(f"lshr {words} {value(f'add {words} {bits}, {bias}')}, splat (i32 16)")
        nan = value(f"fcmp uno {self.vector} {x}, {x}")
        kept = value(f"select {self.mask_type} {nan}, {words} splat (i32 32704), {words} {high}")
        return value(f"trunc {words} {kept} to <{n} x i16>")

    def typed(self, values: list[str]) -> list[tuple[str, str]]:
        """Vectors as a loop carries them."""
        return [(self.vector, value) for value in values]


def transposed(builder: Builder, rows: list[str], element: str) -> list[str]:
    """The columns of a square of vectors, by exchanging ever larger blocks of lanes."""
    width = len(rows)
    vector, step = f"<{width} x {element}>", 1
    while step < width:
        for i in (i for i in range(width) if not i & step):
            low, high = rows[i], rows[i + step]
            keep = [lane if not lane & step else width + lane - step for lane in range(width)]
            move = [lane + step if not lane & step else width + lane for lane in range(width)]
            rows = list(rows)
            rows[i] = shuffled(builder, vector, low, high, keep)
            rows[i + step] = shuffled(builder, vector, low, high, move)
        step *= 2
    return rows


def shuffled(builder: Builder, vector: str, x: str, y: str, lanes: list[int]) -> str:
    chosen = ", ".join(f"i32 {lane}" for lane in lanes)
    return builder.value(
        f"shufflevector {vector} {x}, {vector} {y}, <{len(lanes)} x i32> <{chosen}>"
    )


def tasks_for(flops: int, groups: int, blocks: int) -> int:
    """Into how many tasks to divide `groups` that share what they pack, of `blocks` each.

    A task has work for some microseconds, and starts a new group where that leaves enough tasks.
    """
    if groups == 0:
        return 1
    wanted = most(1, least(64, flops // 400_000))
    with by_sample(groups, blocks):
        starts_groups = bool(groups >= 16 or blocks == 1)
    if starts_groups:
        return most(1, least(wanted, groups // -(-groups // 64)))
    return most(1, least(wanted, groups * least(blocks, -(-16 // most(1, groups)))))


def require_stack(size: int, what: str) -> None:
    """Raise Unsupported if a kernel would need more stack than threads have."""
    if size > STACK_BYTES:
        raise Unsupported(
            f"A {what} with lines of {size} bytes of working memory has no generated kernel, which "
            f"may use {STACK_BYTES} bytes. The reference backend computes it."
        )


def reserved(builder: Builder, count: int, element: str) -> str:
    """Memory of one call, aligned to a cache line."""
    return builder.effect(f"alloca [{count} x {element}], align 64")


def is_one_piece(depth: Index) -> bool:
    """Return True if a sum is of so few steps at all sizes that it is added one by one."""
    return isinstance(depth, int) and depth <= LONGEST_SUM


def add_in_pieces(
    v: Vectors,
    depth: Index,
    sums: list[str],
    step: Callable[[IndexRegister, list[str]], list[str]],
    totals: str,
) -> list[str]:
    """`sums` after step(k, sums) for k from 0 up to `depth`, added in pieces of LONGEST_SUM.

    Args:
        totals: Memory for the sums, where `depth` is not one piece.
    """
    b = v.builder
    if is_one_piece(depth):
        return b.loop(0, depth, 1, [(v.vector, value) for value in sums], step)
    for i, value in enumerate(sums):
        v.store_computed(value, totals, i * v.width)

    def piece(start: IndexRegister, _) -> None:
        end = least_index(start + LONGEST_SUM, depth)
        zeros = [(v.vector, v.zero)] * len(sums)
        for i, value in enumerate(b.loop(start, end, 1, zeros, step)):
            total = v.add(v.load_computed(totals, i * v.width), value)
            v.store_computed(total, totals, i * v.width)

    b.loop(0, depth, LONGEST_SUM, [], piece)
    return [v.load_computed(totals, i * v.width) for i in range(len(sums))]
