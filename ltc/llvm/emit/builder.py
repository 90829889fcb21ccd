"""Text of one LLVM function, instruction by instruction, with explicit vectors.

Pure instructions with the same text are one value wherever the first dominates the second. No LLVM
pass runs on the result, so what should be hoisted out of a loop is written before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ltc.llvm.emit.dtype import literal
from ltc.llvm.emit.index import Index, IndexRegister, Register
from ltc.llvm.emit.kernel_code import head_of, opened
from ltc.support.sizes.extent import Extent

LANES = 16  # of a vector of any element type; LLVM splits it where registers are narrower

ATTRIBUTES = (
    'attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" '
    '"no-trapping-math"="true" }\n'
)
METADATA = "!0 = !{i32 1}\n"  # what !nontemporal refers to
FLUSH = "  fence seq_cst\n"  # after it, other threads see what went past the caches

# What an index of `nest` runs through: from 0 up to a number, or (from, up to, step).
Range = Index | tuple[Index, Index, int]

_SUFFIX = {"float": "f32", "double": "f64", "half": "f16"}


class Builder:
    """Collect the body of a function.

    Attributes:
        width: Lanes of the values now emitted; 1 for scalars.
        passes_caches: True if something is stored past them.
        declarations: Texts of what the body calls or reads outside: declarations, definitions.
    """

    def __init__(self, width: int = LANES):
        self.width = width
        self.passes_caches = False
        self.declarations: set[str] = set()
        self._lines: list[str] = []
        self._known: list[dict[str, Register]] = [{}]
        self._count = self._blocks = 0
        self._block = "entry"

    # --- types and constants ---------------------------------------------------------------------

    def of(self, scalar: str) -> str:
        """The type of `width` elements of a scalar type."""
        return scalar if self.width == 1 else f"<{self.width} x {scalar}>"

    def suffix(self, scalar: str) -> str:
        """Return the type's form in the name of an overloaded intrinsic."""
        name = _SUFFIX.get(scalar, scalar)
        return name if self.width == 1 else f"v{self.width}{name}"

    def constant(self, scalar: str, value: float | int | bool) -> str:
        if isinstance(value, Extent) and scalar == "i64":
            return self.splat(scalar, value)
        text = literal(value, scalar)
        return text if self.width == 1 else f"splat ({scalar} {text})"

    def lanes(self, width: int) -> OtherWidth:
        """`with` it, values are of another width inside the block."""
        return OtherWidth(self, width)

    # --- instructions ----------------------------------------------------------------------------

    def emit(self, text: str) -> None:
        """An instruction without a result."""
        self._lines.append(f"  {text}")

    def effect(self, text: str) -> Register:
        """The result of an instruction that may differ when repeated: a load."""
        self._count += 1
        name = f"%v{self._count}"
        self._lines.append(f"  {name} = {text}")
        return Register(name)

    def value(self, text: str) -> Register:
        """The result of a pure instruction."""
        for scope in reversed(self._known):
            if text in scope:
                return scope[text]
        name = self._known[-1][text] = self.effect(text)
        return name

    def index(self, name: str) -> IndexRegister:
        """The i64 value of that name, to calculate with."""
        return IndexRegister(name, self.value)

    def number(self, k: int) -> IndexRegister:
        """The kernel's i64 argument number k."""
        return self.index(f"%n{k}")

    def where(self, condition: str, x: Index, y: Index) -> IndexRegister:
        """x where the scalar i1 holds, else y."""
        return self.index(self.value(f"select i1 {condition}, i64 {x}, i64 {y}"))

    def binary(self, op: str, scalar: str, x: str, y: str) -> str:
        return self.value(f"{op} {self.of(scalar)} {x}, {y}")

    def compare(self, predicate: str, scalar: str, x: str, y: str) -> str:
        """i1 of a comparison: an fcmp predicate for floats, an icmp predicate otherwise."""
        op = "fcmp" if scalar in _SUFFIX else "icmp"
        return self.value(f"{op} {predicate} {self.of(scalar)} {x}, {y}")

    def select(self, condition: str, scalar: str, x: str, y: str) -> str:
        type = self.of(scalar)
        return self.value(f"select {self.of('i1')} {condition}, {type} {x}, {type} {y}")

    def convert(self, op: str, source: str, x: str, target: str) -> str:
        return self.value(f"{op} {self.of(source)} {x} to {self.of(target)}")

    def intrinsic(self, name: str, scalar: str, *operands: str) -> str:
        """An overloaded intrinsic whose operands and result have one type."""
        type = self.of(scalar)
        function = f"llvm.{name}.{self.suffix(scalar)}"
        return self.pure_call(function, type, *[(type, x) for x in operands])

    def pure_call(self, function: str, result: str, *operands: tuple[str, str]) -> str:
        self.declare(function, result, *[type for type, _ in operands])
        arguments = ", ".join(f"{type} {x}" for type, x in operands)
        return self.value(f"call {result} @{function}({arguments})")

    def by_parts(
        self, function: Callable[..., str], lanes: int, scalar: str, *operands: str
    ) -> str:
        """Return a function's result for vectors of a multiple of the lanes that it takes."""
        if self.width == lanes:
            return function(self, *operands)
        parts = []
        for first in range(0, self.width, lanes):
            cut = [self._shuffled(scalar, x, "poison", first, lanes) for x in operands]
            with self.lanes(lanes):
                parts.append(function(self, *cut))
        while len(parts) > 1:
            with self.lanes(lanes):
                pairs = zip(parts[::2], parts[1::2], strict=True)
                parts = [self._shuffled(scalar, x, y, 0, 2 * lanes) for x, y in pairs]
            lanes *= 2
        return parts[0]

    def _shuffled(self, scalar: str, x: str, y: str, first: int, count: int) -> str:
        """`count` lanes from `first` on, of those of x and then of y."""
        type = self.of(scalar)
        mask = ", ".join(f"i32 {first + k}" for k in range(count))
        return self.value(f"shufflevector {type} {x}, {type} {y}, <{count} x i32> <{mask}>")

    def declare(self, function: str, result: str, *types: str) -> None:
        self.declarations.add(f"declare {result} @{function}({', '.join(types)})")

    def splat(self, scalar: str, x: Any) -> str:
        """A scalar in every lane."""
        if isinstance(x, Extent):
            if scalar != "i64":
                x = self.value(f"trunc i64 {x} to {scalar}")
            elif self.width == 1:
                return str(x)
            else:
                x = self.value(f"add i64 {x}, 0")  # a register, which may be an argument
        x = str(x) if isinstance(x, int) else x
        if self.width == 1:
            return x
        if x[0] != "%":
            return f"splat ({scalar} {x})"
        type = self.of(scalar)
        one = self.value(f"insertelement {type} poison, {scalar} {x}, i64 0")
        zeros = f"<{self.width} x i32> zeroinitializer"
        return self.value(f"shufflevector {type} {one}, {type} poison, {zeros}")

    def vector_of(self, scalar: str, lanes: Sequence[str]) -> str:
        """A vector of scalars, one for each lane."""
        vector = "poison"
        for lane, x in enumerate(lanes):
            place = f"{scalar} {x}, i64 {lane}"
            vector = self.value(f"insertelement {self.of(scalar)} {vector}, {place}")
        return vector

    # --- addresses, in elements ------------------------------------------------------------------

    def share(self, items: Index) -> tuple[Index, Index]:
        """The items of this task: from the first up to but not including the second."""
        task, tasks = self.index("%task"), self.index("%tasks")
        return task * items // tasks, (task + 1) * items // tasks

    def address(self, pointer: str, offset: Index, element: str) -> str:
        if offset.__class__ is int and offset == 0:
            return pointer
        return self.value(f"getelementptr inbounds {element}, ptr {pointer}, i64 {offset}")

    def prefetch(self, pointer: str, level: int = 1) -> None:
        """Ask for a line of memory; `level`: of the cache that it should come to, 1 to 3."""
        self.declare("llvm.prefetch.p0", "void", "ptr", "i32", "i32", "i32")
        self.emit(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 {4 - level}, i32 1)")

    # --- control ---------------------------------------------------------------------------------

    def label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self._block = name

    def loop(
        self,
        low: Index,
        high: Index,
        step: int,
        carried: Sequence[tuple[str, str | int]],
        body: Callable[[IndexRegister, list[str]], Sequence[str | int] | None],
    ) -> list[str]:
        """for i in range(low, high, step): carried = body(i, carried); what is carried at the end.

        Args:
            carried: (LLVM type, first value) of each.
        """
        number, before = self._blocks, self._block
        self._blocks += 1
        enters = self.value(f"icmp slt i64 {low}, {high}")
        self.emit(f"br i1 {enters}, label %loop{number}, label %end{number}")
        self.label(f"loop{number}")
        first_line = len(self._lines)
        inside = [
            self._register(type, f"%carried{number}_{k}") for k, (type, _) in enumerate(carried)
        ]
        self._lines.extend([""] * (1 + len(carried)))
        self._known.append({})
        after = body(self.index(f"%i{number}"), inside) or []
        following = self.effect(f"add nuw nsw i64 %i{number}, {step}")
        again = self.effect(f"icmp slt i64 {following}, {high}")
        self._known.pop()
        latch = self._block
        self.emit(f"br i1 {again}, label %loop{number}, label %end{number}")
        self._lines[first_line] = (
            f"  %i{number} = phi i64 [ {low}, %{before} ], [ {following}, %{latch} ]"
        )
        for k, (type, first) in enumerate(carried):
            self._lines[first_line + 1 + k] = (
                f"  {inside[k]} = phi {type} [ {first}, %{before} ], [ {after[k]}, %{latch} ]"
            )
        self.label(f"end{number}")
        return [
            self._phi(type, f"[ {first}, %{before} ], [ {after[k]}, %{latch} ]")
            for k, (type, first) in enumerate(carried)
        ]

    def nest(
        self,
        ranges: Sequence[Range],
        carried: Sequence[tuple[str, str]],
        body: Callable[..., list[str] | None],
    ) -> list[str]:
        """Loops around each other, the last one innermost: carried = body(i, j, ..., carried)."""
        types = [type for type, _ in carried]

        def inside(indices: tuple[IndexRegister, ...], values: list[str]) -> list[str] | None:
            if len(indices) == len(ranges):
                return body(*indices, values)
            one = ranges[len(indices)]
            low, high, step = one if isinstance(one, tuple) else (0, one, 1)
            again = list(zip(types, values))
            return self.loop(low, high, step, again, lambda i, now: inside((*indices, i), now))

        return inside((), [value for _, value in carried]) or []

    def when(
        self,
        condition: str,
        carried: Sequence[tuple[str, str | int]],
        body: Callable[[], Sequence[str | int] | None],
    ) -> list[str]:
        """Return the results of `body` if the scalar i1 holds; else the carried values."""
        number, before = self._blocks, self._block
        self._blocks += 1
        self.emit(f"br i1 {condition}, label %then{number}, label %end{number}")
        self.label(f"then{number}")
        self._known.append({})
        after = body() or []
        self._known.pop()
        last = self._block
        self.emit(f"br label %end{number}")
        self.label(f"end{number}")
        return [
            self._phi(type, f"[ {first}, %{before} ], [ {after[k]}, %{last} ]")
            for k, (type, first) in enumerate(carried)
        ]

    def _phi(self, type: str, values: str) -> Register:
        return self._register(type, self.effect(f"phi {type} {values}"))

    def _register(self, type: str, name: str) -> Register:
        return self.index(name) if type == "i64" else Register(name)

    def body(self) -> str:
        return "\n".join(self._lines)


class OtherWidth:
    """Another width of a builder's values inside a block; entered for most loads and stores."""

    __slots__ = ("_builder", "_width", "_before")

    def __init__(self, builder: Builder, width: int):
        self._builder, self._width = builder, width

    def __enter__(self) -> None:
        self._before, self._builder.width = self._builder.width, self._width

    def __exit__(self, *error: object) -> None:
        self._builder.width = self._before


def multiples(width: int, step: int = 1, element: str = "i32") -> str:
    """The vector 0, step, 2 * step, ..."""
    return f"<{', '.join(f'{element} {i * step}' for i in range(width))}>"


def function_text(name: str, pointers: int, builder: Builder, numbers: int = 0) -> str:
    """A module of one function, whose body knows its pointers as %p0, ... and its numbers as %n0, ..."""
    body, sizes = opened(builder.body(), numbers)
    declarations = "\n".join(sorted(builder.declarations))
    end = FLUSH if builder.passes_caches else ""
    return (
        f"{head_of(sizes)}{declarations}\n{opening(name, pointers, numbers + len(sizes))}"
        f"{body}\n{end}  ret void\n}}\n{ATTRIBUTES}{METADATA}"
    )


def opening(name: str, pointers: int, numbers: int = 0) -> str:
    """The beginning of `void @name(ptr arguments, i64 task, i64 tasks)`.

    The pointers and then the numbers stand in an array: kernels of any number of operands are called in
    one way.
    """
    loads = argument_loads(pointers, numbers)
    return f"define void @{name}(ptr %arguments, i64 %task, i64 %tasks) #0 {{\nentry:\n{loads}"


def argument_loads(pointers: int, numbers: int = 0) -> str:
    """Instructions that give a function's arguments their names."""
    names = [("ptr", f"p{k}") for k in range(pointers)] + [("i64", f"n{k}") for k in range(numbers)]
    return "".join(
        f"  %at{k} = getelementptr i64, ptr %arguments, i64 {k}\n  %{name} = load {type}, ptr %at{k}\n"
        for k, (type, name) in enumerate(names)
    )
