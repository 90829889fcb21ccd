"""From a kernel to the text of its function: loops, loads, stores, and what lies between.

The points are cut into units: a row, or a strip of a long innermost dimension. Units are shared
out among a fixed number of tasks. One variable runs over the lanes of vectors: the innermost one,
or, where a reduction's rows lie side by side in memory, the last one that stays. A value is
computed in the outermost loop that has all variables it depends on, as a scalar where it does not
depend on the vector one.

What changes with the size of a batch or the place of a slice is no part of the text: the outermost
extents, offsets and constants are arguments of the kernel.
"""

from __future__ import annotations

from math import prod

from ltc.ir import ops
from ltc.ir.kernel import READS, Affine, Guard, Kernel, Store, Value
from ltc.ir.node import Node
from ltc.llvm import access, reduction
from ltc.llvm.arguments import Arguments
from ltc.llvm.builder import LANES, Builder, function_text
from ltc.llvm.code import KernelCode
from ltc.llvm.dtype import FORMS, Form
from ltc.llvm.elementwise import COSTLY, computed
from ltc.llvm.lanes import transposed
from ltc.llvm.checks import Report, faults_of, inside_of, report_where, wrapped
from ltc.llvm.rng import random_bits
from ltc.llvm.stored import from_memory, to_memory

STRIP = 2048  # elements of the innermost dimension in one unit
TASK_WORK = 1 << 15  # values that one task computes, at least: a few microseconds
MOST_TASKS = 64
COLUMNS_TOGETHER = 4  # vectors of columns that are reduced or computed at once
LONG_CHAIN = 100  # instructions: a processor looks some 200 ahead for what need not wait
INSTRUCTIONS_OF_A_FUNCTION = 25
MOST_VALUES_OF_A_TILE = 40  # each is computed once for every row of the tile
CHAIN = 32  # additions to one accumulator before it is added to another: sums stay accurate
MOST_COLUMN_SUMS = 3  # in one pass: their accumulators fill the registers
BLOCKS = (512, 64, 8)  # likewise where rows are added: blocks of blocks of rows
LONGEST_KEPT_ROW = 4096  # elements: a quarter of a first-level cache
LONG_ROW = 1024  # elements from which on a row that is only reduced is as fast with any extent
ACCUMULATORS = 4  # vectors: additions depend on one another only every fourth time


def kernel_code(kernel: Kernel, streamed: frozenset[Node] = frozenset()) -> KernelCode:
    """The kernel's function; `streamed`: what it writes to memory past the caches."""
    emitter = Emitter(kernel, streamed=streamed)
    wide = COLUMNS_TOGETHER * LANES
    if (emitter.reduces_columns or emitter.is_long_chain) and emitter.row_length >= wide:
        # Whole runs of cache lines from each row; vectors to work on while others wait.
        emitter = Emitter(kernel, lanes=wide, streamed=streamed)
    return emitter.code()


# --- loop variables ------------------------------------------------------------------------------


class Space:
    """The variables that are left when neighbours which always move together are one.

    extents  of the new variables
    depth    how many of them come before the boundary
    """

    def __init__(self, kernel: Kernel, forms: list[Affine], boundary: int):
        groups = [[v] for v, extent in enumerate(kernel.space) if extent > 1]
        depth = sum(1 for (v,) in groups if v < boundary)
        k = len(groups) - 1
        while k > 0:
            if k != depth and self._move_together(kernel.space, groups[k - 1], groups[k], forms):
                groups[k - 1 : k + 1] = [groups[k - 1] + groups[k]]
                depth -= k < depth
            k -= 1
        self.extents = [prod(kernel.space[v] for v in group) for group in groups]
        self.depth = depth
        self._new = {group[-1]: k for k, group in enumerate(groups)}

    @staticmethod
    def _move_together(space, outer: list[int], inner: list[int], forms: list[Affine]) -> bool:
        extent = prod(space[v] for v in inner)
        return all(
            form.coefficient(outer[-1]) == form.coefficient(inner[-1]) * extent for form in forms
        )

    def renumbered(self, variables: tuple[int, ...]) -> list[int]:
        """The new variables that stand for some of the kernel's."""
        return [self._new[v] for v in variables if v in self._new]

    def form(self, form: Affine) -> Affine:
        """A form of the kernel's variables, in the new ones."""
        terms = tuple((self._new[v], c) for v, c in form.terms if v in self._new)
        return Affine(form.constant, tuple(sorted(terms)))


def _forms(values: list[Value], stores: tuple[Store, ...]) -> list[Affine]:
    forms = [store.offset for store in stores]
    for value in values:
        forms.extend(guard.form for guard in value.guards)
        if value.kind in READS:
            forms.append(value.data[1])
        elif value.kind in ("position", "random"):
            forms.append(_position_of(value))
    return forms


def _position_of(value: Value) -> Affine:
    return value.data if value.kind == "position" else value.data[0]


# --- the emitter ---------------------------------------------------------------------------------


class Emitter:
    """Writes the instructions of one kernel.

    boundary  variables before it and from it on are never joined, where there is no reduction
    lanes     of its vectors
    streamed  nodes whose buffers, aligned to vectors, are written past the caches
    """

    def __init__(
        self, kernel: Kernel, builder: Builder | None = None, lanes: int = LANES, boundary: int = 0,
        streamed: frozenset[Node] = frozenset(),
    ):  # fmt: skip
        self.kernel, self.lanes, self.streamed = kernel, lanes, streamed
        self.order = kernel.values()
        self.space = Space(kernel, _forms(self.order, kernel.stores), boundary or kernel.depth)
        self.depth = self.space.depth
        self.reductions = [v for v in self.order if v.kind == "reduced"]
        self.summed = self.space.renumbered(kernel.summed())
        self.vector = self._vector_variable()
        is_epilogue = builder is not None  # whose product says where each vector of it lies
        self.transposes = not (self.reductions or is_epilogue) and bool(self._column_loads())
        self.tiles = self.transposes and self._fits_tiles()
        self.b = builder or Builder(lanes)
        self.arguments = Arguments(self.b, is_open=builder is None)
        self.arguments.place(self.order)
        self.open = self._open_variables() if builder is None else frozenset()
        self.checks = {value: min(k, 254) + 1 for k, value in enumerate(kernel.checks())}
        self.nodes = (*kernel.reads(), *kernel.writes(), *faults_of(kernel))
        self.pointer = {node: f"%p{k}" for k, node in enumerate(kernel.reads())}
        first = len(self.pointer)
        self.target = {node: f"%p{first + k}" for k, node in enumerate(kernel.writes())}
        self.variables: dict[int, str] = {}
        self.mask: str | None = None
        self.known: list[dict[Value, str]] = [{}]
        self.row_of: dict[Value, str] = {}  # memory of functions that several passes read
        self.row_being_made: set[Value] = set()
        self.following: list[tuple[Value, int]] = []  # what the pass under way fetches as well
        self.row_is_there: set[Value] = set()
        self.needs = self._needs()
        self.is_vector = self._vectors()

    def code(self) -> KernelCode:
        tasks = self._tasks()
        units = self.arguments.number("units", self._units())
        self.arguments.splat_constants(self.order, self.lanes)
        self._keep_row_values()
        low, high = self.b.share(units)
        with self._scope():
            self._hoist([store.value for store in self.kernel.stores])
            self.b.loop(low, high, 1, (), lambda unit, _: self._unit(unit))
        if self.streamed:
            self.b.emit("fence seq_cst")  # other threads see what went past the caches
        numbers = self.arguments.numbers
        text = function_text("kernel", len(self.nodes), self.b, len(numbers))
        shifts = tuple(self.arguments.shifts.get(node, 0) for node in self.kernel.reads())
        return KernelCode(text, self.nodes, tasks, shifts, numbers)

    # --- extents that the text leaves open -------------------------------------------------------

    def _open_variables(self) -> frozenset[int]:
        """The outermost variable and the outermost reduced one, but no short row of lanes."""
        extents, depth = self.space.extents, self.depth
        if not extents:
            return frozenset()
        last = len(extents) - 1
        is_open = {0} if not self.reductions or depth != 0 and self.vector != 0 else set()
        if self.transposes and last <= 1:
            is_open.clear()
        if self.reductions and depth <= last and self._any_extent(depth):
            is_open.add(depth)
        is_open.update(self.summed[:1])
        return frozenset(is_open)

    def _any_extent(self, variable: int) -> bool:
        """Whether loops over a reduced variable are as good where its extent is an argument."""
        if variable != self.vector or self.depth == 0:
            return True
        is_last = variable == len(self.space.extents) - 1
        rows = self.kernel.depth
        is_short = all(v < rows for store in self.kernel.stores for v, _ in store.offset.terms)
        return is_last and is_short and self.space.extents[variable] >= LONG_ROW

    def extent(self, variable: int) -> int | str:
        """What the variable stays below: the name of an argument, or a number."""
        if variable in self.open:
            return self.arguments.number(("extent", variable), self.space.extents[variable])
        return self.space.extents[variable]

    # --- what depends on what --------------------------------------------------------------------

    def _vector_variable(self) -> int | None:
        """The variable that runs over lanes; None where there is no variable."""
        extents, depth = self.space.extents, self.depth
        if not extents:
            return None
        last = len(extents) - 1
        if not self.reductions or depth == 0 or depth > last or self.summed:
            return last
        loads = [self.space.form(v.data[1]) for v in self.order if v.kind == "load"]
        inside = [form for form in loads if any(v >= depth for v, _ in form.terms)]

        def suits(variable: int) -> tuple[int, int]:
            """Fewer loads whose lanes lie apart, then more whose lanes are neighbours."""
            steps = [form.coefficient(variable) for form in inside]
            return -sum(step not in (0, 1) for step in steps), steps.count(1)

        return depth - 1 if suits(depth - 1) > suits(last) else last

    def _column_loads(self) -> list[Value]:
        """Loads whose neighbours in memory are neighbouring rows: then rows go innermost.

        A cache line that one row has fetched is then read by the next ones.
        """
        last = len(self.space.extents) - 1
        if last <= 0:
            return []
        return [
            value
            for value in self.order
            if value.kind == "load"
            and self.space.form(value.data[1]).coefficient(last) > 1
            and self.space.form(value.data[1]).coefficient(last - 1) == 1
        ]

    def _fits_tiles(self) -> bool:
        """Whether squares of vectors, turned in registers, cover the last two variables."""
        whole = all(extent % self.lanes == 0 for extent in self.space.extents[-2:])
        plain = not any(value.guards for value in self._column_loads())
        return whole and plain and len(self.order) <= MOST_VALUES_OF_A_TILE

    def _needs(self) -> dict[Value, frozenset[int]]:
        """The variables that each value depends on."""
        needs: dict[Value, frozenset[int]] = {}
        rows = frozenset(range(self.depth))
        for value in self.order:
            if value.kind == "reduced":
                needs[value] = rows
                continue
            forms = [guard.form for guard in value.guards]
            if value.kind in READS:
                forms.append(value.data[1])
            elif value.kind in ("position", "random"):
                forms.append(_position_of(value))
            own = {v for form in forms for v, _ in self.space.form(form).terms}
            needs[value] = frozenset(own).union(*[needs[x] for x in value.operands])
        return needs

    def _vectors(self) -> dict[Value, bool]:
        return {value: self.vector in needs for value, needs in self.needs.items()}

    # --- units -----------------------------------------------------------------------------------

    @property
    def row_length(self) -> int:
        """Elements of the vector variable, 0 where there is none."""
        return 0 if self.vector is None else self.space.extents[self.vector]

    @property
    def is_long_chain(self) -> bool:
        """Whether the next vector's instructions are too far away to fill the waits of this one."""
        if self.reductions or self.transposes:
            return False
        costly = sum(value.kind == "cell" and value.op in COSTLY for value in self.order)
        return len(self.order) + costly * INSTRUCTIONS_OF_A_FUNCTION >= LONG_CHAIN

    @property
    def reduces_columns(self) -> bool:
        """Whether the lanes of a vector are rows whose reductions run side by side."""
        return bool(self.reductions) and self._has_strips

    @property
    def _has_strips(self) -> bool:
        """Whether the vector variable is the last one of a unit's row."""
        return self.vector is not None and (not self.reductions or self.vector < self.depth)

    def _row_variables(self) -> list[int]:
        """The variables that a unit fixes."""
        if not self.reductions:
            return list(range(len(self.space.extents) - 1))
        rows = range(self.depth - 1 if self._has_strips else self.depth)
        return [v for v in rows if v not in self.summed]

    def _strip(self) -> int:
        """Elements of the vector variable in one unit; narrow where columns are read."""
        return COLUMNS_TOGETHER * LANES if self.reductions or self.transposes else STRIP

    def _strips(self) -> int:
        return -(-self.space.extents[self.vector] // self._strip()) if self._has_strips else 1

    def _units(self) -> int:
        rows = prod(self.space.extents[v] for v in self._row_variables()) * self._strips()
        return rows // self.lanes if self.tiles else rows

    def _tasks(self) -> int:
        work = prod(self.space.extents) * max(1, len(self.order) // 8) * (1 + len(self.reductions))
        return max(1, min(self._units(), -(-work // TASK_WORK), MOST_TASKS))

    def _unit(self, unit: str) -> None:
        rest, strips, strip = unit, self._strips(), "0"
        rows = self._row_variables()
        if self._has_strips and not rows:
            strip = unit
        elif strips > 1 and self.transposes:
            each = self.arguments.number("rows", self._units() // strips)
            rest, strip = self._divided(unit, each)
        elif strips > 1:
            strip, rest = self._divided(unit, strips)
        self._locate(rows, rest)
        if self.tiles:  # what depends on this variable is not hoisted: each row has its own
            self.first_row = self.b.multiply(self.variables.pop(rows[-1]), self.lanes)
        with self._scope():
            self._hoist([store.value for store in self.kernel.stores])
            if self._has_strips:
                self._over_strip(strip)
            elif self.summed:
                self._sum_rows()
            else:
                self._row()

    def _locate(self, variables: list[int], number: str) -> None:
        """The variables of a row, from its number."""
        for v in reversed(variables[1:]):
            extent = self.space.extents[v]
            if self.tiles and v == variables[-1]:
                extent //= self.lanes
            self.variables[v], number = self._divided(number, extent)
        if variables:
            self.variables[variables[0]] = number

    def at_rows(self, number: str) -> None:
        """The variables before the boundary, from the number of a row."""
        self._locate(list(range(self.depth)), number)

    def _divided(self, x: str, extent: int | str) -> tuple[str, str]:
        """(x % extent, x // extent)"""
        return (
            self.b.value(f"urem i64 {x}, {extent}"),
            self.b.value(f"udiv i64 {x}, {extent}"),
        )

    def _over_strip(self, strip: str) -> None:
        extent, length = self.extent(self.vector), self._strip()
        first = self.b.multiply(strip, length) if strip != "0" else "0"
        limit: str | int = extent
        if isinstance(extent, str) or extent > length:
            end = self.b.add(first, length)
            short = self.b.value(f"icmp slt i64 {end}, {extent}")
            limit = self.b.value(f"select i1 {short}, i64 {end}, i64 {extent}")
        body = self._tile if self.tiles else self._point
        self._over_vectors(first, limit, (), lambda carried: body())

    def _over_vectors(self, first: str, limit: str | int, carried, body) -> list[str]:
        """The vector variable from first (a multiple of the lanes) to limit, the rest masked."""
        extent = self.extent(self.vector)
        if isinstance(extent, str):
            return self._over_any_vectors(first, limit, carried, body)
        whole = extent // self.lanes * self.lanes
        values = [value for _, value in carried]
        if whole:
            until = (
                whole
                if extent == whole or isinstance(limit, int)
                else self.b.value(f"and i64 {limit}, -{self.lanes}")
            )
            until = limit if extent == whole else until
            values = self.b.loop(
                first, until, self.lanes, carried, lambda i, inside: self._at(i, None, inside, body)
            )
        if extent > whole:
            again = [(type, value) for (type, _), value in zip(carried, values)]

            def rest() -> list[str]:
                inside = [value for _, value in again]
                return self._at(str(whole), self._tail(extent - whole), inside, body)

            if isinstance(limit, int):
                values = rest()
            else:
                at_end = self.b.value(f"icmp eq i64 {limit}, {extent}")
                values = self.b.when(at_end, again, rest)
        return values

    def _over_any_vectors(self, first: str, limit: str, carried, body) -> list[str]:
        """The same where the extent is an argument, and with it how many lanes the rest has."""
        until = self.b.value(f"and i64 {limit}, -{self.lanes}")
        values = self.b.loop(
            first, until, self.lanes, carried, lambda i, inside: self._at(i, None, inside, body)
        )
        again = [(type, value) for (type, _), value in zip(carried, values)]
        has_rest = self.b.value(f"icmp slt i64 {until}, {limit}")

        def rest() -> list[str]:
            mask = self._some_lanes(self.b.value(f"sub i64 {limit}, {until}"))
            return self._at(until, mask, [value for _, value in again], body)

        return self.b.when(has_rest, again, rest)

    def _some_lanes(self, count: str) -> str:
        """The mask of the first `count` lanes."""
        with self.b.lanes(self.lanes):
            return self.b.compare("slt", "i64", self._stepping("0", 1), self.b.splat("i64", count))

    def _at(self, i: str, mask: str | None, carried: list[str], body) -> list[str]:
        with self._scope():
            self.variables[self.vector], self.mask = i, mask
            result = body(carried)
        self.mask = None
        return result or []

    def _tail(self, count: int) -> str:
        bits = ", ".join(f"i1 {'true' if lane < count else 'false'}" for lane in range(self.lanes))
        return f"<{bits}>"

    # --- one row, or one vector of them ----------------------------------------------------------

    def _tile(self) -> None:
        """A square of rows and lanes: what lies in columns is loaded so, and turned."""
        row, column = len(self.space.extents) - 2, self.variables[self.vector]
        turned = {load: self._turned(load, row, column) for load in self._column_loads()}
        for k in range(self.lanes):
            with self._scope():
                self.variables[row] = self.b.add(self.first_row, k)
                for load, vectors in turned.items():
                    self.known[-1][load] = from_memory(self.b, FORMS[load.dtype], vectors[k])
                self._store_all(list(self.kernel.stores))

    def _turned(self, load: Value, row: int, column: str) -> list[str]:
        """The stored elements of each row of the tile, one vector each."""
        node, offset = load.data
        form, offset = FORMS[load.dtype], self.space.form(offset)
        columns = []
        for k in range(self.lanes):
            with self._scope():
                self.variables[row] = self.first_row
                self.variables[self.vector] = self.b.add(column, k)
                base = self._element(load, offset)
            address = self.b.address(self.pointer[node], base, form.stored)
            columns.append(access.load(self.b, address, form))
        return transposed(self.b, columns, form.stored)

    def _point(self) -> None:
        """Everything at one vector of the row variables: reductions, then stores."""
        if self.reductions:
            self._row()
            return
        self._store_all(list(self.kernel.stores))

    def _sum_rows(self) -> None:
        """The rows of a unit, one after the other: some stores add them up."""
        inner = list(range(self.depth, len(self.space.extents)))
        sums = [store for store in self.kernel.stores if store.sums]
        self._nest(inner, [], [], lambda _: self._begin_sums(sums))
        self._each_row(self.summed)

    def _begin_sums(self, sums: list[Store]) -> None:
        with self.b.lanes(self.lanes):
            for store in sums:
                form = FORMS[store.node.dtype]
                first = self.b.constant(form.computed, reduction.start(store.sums, form))
                access.store(self.b, first, self._address(store), form, self.mask)

    def _each_row(self, variables: list[int]) -> None:
        if not variables:
            self._row()
            return

        def one(i: str, _) -> None:
            with self._scope():
                self.variables[variables[0]] = i
                self._hoist([store.value for store in self.kernel.stores])
                self._each_row(variables[1:])

        self.b.loop("0", self.extent(variables[0]), 1, (), one)

    def _row(self) -> None:
        inner = list(range(self.depth, len(self.space.extents)))
        together = self._columns_together()
        if together:
            self._reduce_columns(together, inner)
        for value in self.reductions[len(together) :]:
            self._hoist([value])
            if value is self.reductions[-1] and len(self.reductions) > 1:
                self.following = self._loads_of_following_row(inner)
            self._reduce(value, inner)
            self.following = []
            self.row_is_there |= self.row_being_made
        rows = self.kernel.depth
        short = [s for s in self.kernel.stores if all(v < rows for v, _ in s.offset.terms)]
        full = [store for store in self.kernel.stores if store not in short]
        if not inner:
            short, full = [*short, *full], []
        self._store_all(short)
        if full:
            self._hoist([store.value for store in full])
            roots = [store.value for store in full]
            self._nest(inner, roots, [], lambda _: self._store_all(full))

    def _loads_of_following_row(self, inner: list[int]) -> list[tuple[Value, int]]:
        """What the first pass over the next row will wait for, and how many elements away it is.

        The passes over a row find it in the cache but for the first one: fetched during the last
        reduction, which computes and hardly touches memory, it does not wait either.
        """
        if inner != [self.vector] or not self.depth or self.space.extents[self.vector] < LONG_ROW:
            return []
        found = []
        for value in self.order:
            if value.kind == "load" and not value.guards:
                form = self.space.form(value.data[1])
                step = form.coefficient(self.depth - 1)
                if step > 0 and form.coefficient(self.vector) == 1:
                    found.append((value, step))
        return found

    def prefetch(self, load: Value, step: int = 0) -> None:
        node, offset = load.data
        with self.b.lanes(1):
            base = self.b.add(self._element(load, self.space.form(offset)), step)
            address = self.b.address(self.pointer[node], base, FORMS[node.dtype].stored)
        self.b.prefetch(address)

    def _columns_together(self) -> list[Value]:
        """The first reductions, where they add up rows and none of them needs another."""
        if not self.reduces_columns or len(self.reductions) < 2:
            return []
        found: list[Value] = []
        for value in self.reductions[:MOST_COLUMN_SUMS]:
            if any(x.kind == "reduced" for x in self._operands_of(value)):
                break
            found.append(value)
        return found if len(found) > 1 else []

    def _operands_of(self, value: Value) -> set[Value]:
        """What a value is computed from, reductions included."""
        seen: set[Value] = set()
        waiting = list(value.operands)
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting.extend(one.operands)
        return seen

    def _reduce_columns(self, values: list[Value], inner: list[int]) -> None:
        """Several sums of rows in one pass over them."""
        self._hoist(values)
        mask, forms = self.mask, [FORMS[value.dtype] for value in values]
        with self.b.lanes(self.lanes):
            starts = [
                (
                    self.b.of(form.computed),
                    self.b.constant(form.computed, reduction.start(value.op, form)),
                )
                for value, form in zip(values, forms)
            ]

            def body(carried: list[str]) -> list[str]:
                with self.b.lanes(self.lanes):
                    ones = [self.lanes_of(value.operands[0], self.lanes) for value in values]
                    return [
                        reduction.combine(self.b, value.op, form, x, one)
                        for value, form, x, one in zip(values, forms, carried, ones)
                    ]

            totals = self._in_blocks(values, inner, starts, body)
            self.mask = mask
            for value, form, total in zip(values, forms, totals):
                self.known[-1][value] = reduction.finished(self.b, form, total)

    def _store_all(self, stores: list[Store]) -> None:
        for store in stores:
            self.store(store)

    def _nest(self, inner: list[int], roots: list[Value], carried, body) -> list[str]:
        """Loops over the inner variables around a body that takes and gives what is carried.

        roots  the values that the body computes
        """
        if not inner:
            with self._scope():
                return body([value for _, value in carried]) or []
        variable = inner[0]
        if variable == self.vector:
            return self._over_vectors("0", self.extent(variable), carried, body)

        return self.b.loop(
            "0", self.extent(variable), 1, carried, self._step_of(inner, roots, carried, body)
        )

    def _step_of(self, inner: list[int], roots: list[Value], carried, body):
        """What a loop over the first inner variable does: the loops inside it."""

        def step(i: str, values: list[str]) -> list[str]:
            with self._scope():
                self.variables[inner[0]] = i
                self._hoist(roots)
                again = [(type, value) for (type, _), value in zip(carried, values)]
                return self._nest(inner[1:], roots, again, body)

        return step

    def _reduce(self, value: Value, inner: list[int]) -> None:
        (operand,) = value.operands
        form = FORMS[value.dtype]
        across = self.vector in inner
        width = self.lanes if across or self.vector is not None and self.vector < self.depth else 1
        with self.b.lanes(width):
            type = self.b.of(form.computed)
            first = self.b.constant(form.computed, reduction.start(value.op, form))

            def body(carried: list[str]) -> list[str]:
                for load, step in self.following:
                    self.prefetch(load, step)
                with self.b.lanes(width):
                    one = self.lanes_of(operand, width)
                    if across and self.mask is not None:
                        one = self.b.select(self.mask, form.computed, one, first)
                    return [reduction.combine(self.b, value.op, form, carried[0], one)]

            if across and self._unrolls(inner):
                total = self._unrolled(value, form, type, first, body)
            elif across and len(inner) > 1 and self._unrolls(inner[-1:]):

                def row(carried: list[str]) -> list[str]:
                    with self.b.lanes(width):
                        part = self._unrolled(value, form, type, first, body)
                        return [reduction.combine(self.b, value.op, form, carried[0], part)]

                (total,) = self._in_blocks([value], inner[:-1], [(type, first)], row)
            else:
                mask = self.mask
                (total,) = self._in_blocks([value], inner, [(type, first)], body)
                self.mask = mask
            if across:
                total = reduction.across_lanes(self.b, value.op, form, total)
        with self.b.lanes(1 if across else width):
            self.known[-1][value] = reduction.finished(self.b, form, total)

    def _in_blocks(
        self, values: list[Value], inner: list[int], starts, body, sizes=BLOCKS
    ) -> list[str]:
        """The total over loops, the outermost one in blocks of blocks: no chain is long."""
        variable = inner[0] if inner else self.vector
        if variable == self.vector:
            return self._nest(inner, values, starts, body)
        is_open, limit = variable in self.open, self.extent(variable)
        sizes = [size for size in sizes if is_open or size < self.space.extents[variable]]

        def sum_from(low: str, limit: str | int, sizes: list[int]) -> list[str]:
            if not sizes:
                step = self._step_of(inner, values, starts, body)
                return self.b.loop(low, limit, 1, starts, step)

            def block(low: str, carried: list[str]) -> list[str]:
                end = self.b.add(low, sizes[0])
                short = self.b.value(f"icmp slt i64 {end}, {limit}")
                end = self.b.value(f"select i1 {short}, i64 {end}, i64 {limit}")
                parts = sum_from(low, end, sizes[1:])
                return [
                    reduction.combine(self.b, value.op, FORMS[value.dtype], x, y)
                    for value, x, y in zip(values, carried, parts)
                ]

            return self.b.loop(low, limit, sizes[0], starts, block)

        return sum_from("0", limit, sizes)

    def _unrolls(self, inner: list[int]) -> bool:
        if len(inner) > 1:
            return False
        return self.vector in self.open or self.space.extents[self.vector] >= 2 * self._step

    @property
    def _step(self) -> int:
        """Elements that the accumulators take in at once."""
        return ACCUMULATORS * self.lanes

    def _unrolled(self, value: Value, form: Form, type: str, first: str, body) -> str:
        """The total over the one inner variable, in several accumulators."""
        step = self._step
        starts = [(type, first)] * ACCUMULATORS

        def several(i: str, carried: list[str]) -> list[str]:
            return [
                self._at(self.b.add(i, k * self.lanes), None, [one], body)[0]
                for k, one in enumerate(carried)
            ]

        def block(i: str, carried: list[str]) -> list[str]:
            parts = self.b.loop(i, self.b.add(i, step * CHAIN), step, starts, several)
            return [reduction.combine(self.b, value.op, form, x, y) for x, y in zip(carried, parts)]

        totals = [first] * ACCUMULATORS
        if self.vector in self.open:
            totals = self._of_any_extent(starts, block, several, body)
        else:
            totals = self._of_known_extent(starts, block, several, body)
        while len(totals) > 1:
            totals = [
                reduction.combine(self.b, value.op, form, x, y)
                for x, y in zip(totals[::2], totals[1::2])
            ]
        return totals[0]

    def _of_known_extent(self, starts, block, several, body) -> list[str]:
        extent, step = self.space.extents[self.vector], self._step
        whole = extent // step * step
        blocks = whole // (step * CHAIN) * step * CHAIN
        totals = [value for _, value in starts]
        if blocks:
            totals = self.b.loop("0", blocks, step * CHAIN, starts, block)
        if blocks < whole:
            again = [(type, one) for (type, _), one in zip(starts, totals)]
            totals = self.b.loop(blocks, whole, step, again, several)
        for position in range(whole, extent, self.lanes):
            mask = self._tail(extent - position) if extent - position < self.lanes else None
            k = (position - whole) // self.lanes
            (totals[k],) = self._at(str(position), mask, [totals[k]], body)
        return totals

    def _of_any_extent(self, starts, block, several, body) -> list[str]:
        extent, step = self.extent(self.vector), self._step
        assert step & (step - 1) == 0, step
        blocks = self.b.value(f"and i64 {extent}, -{step * CHAIN}")
        whole = self.b.value(f"and i64 {extent}, -{step}")
        totals = self.b.loop("0", blocks, step * CHAIN, starts, block)
        again = [(type, one) for (type, _), one in zip(starts, totals)]
        totals = self.b.loop(blocks, whole, step, again, several)
        rest = self._over_any_vectors(whole, extent, [(starts[0][0], totals[0])], body)
        return [*rest, *totals[1:]]

    # --- values ----------------------------------------------------------------------------------

    def _scope(self):
        return _Scope(self)

    def _find(self, value: Value) -> str | None:
        for scope in reversed(self.known):
            if value in scope:
                return scope[value]
        return None

    def _hoist(self, roots: list[Value]) -> None:
        """Compute now what the loops to come would compute again each time."""
        available = set(self.variables)
        wanted: list[Value] = []
        seen: set[Value] = set()
        waiting = list(roots)
        while waiting:
            value = waiting.pop()
            if value in seen or self._find(value) is not None:
                continue
            seen.add(value)
            if self._is_ready(value, available) and value.kind != "constant":
                wanted.append(value)
            else:
                waiting.extend(value.operands)
        for value in wanted:
            self._value(value)

    def _is_ready(self, value: Value, available: set[int]) -> bool:
        """Whether everything it is computed from, reductions included, is there already."""
        waiting, seen = [value], set()
        while waiting:
            one = waiting.pop()
            if one in seen or self._find(one) is not None:
                continue
            seen.add(one)
            if one.kind == "reduced" or not self.needs[one] <= available:
                return False
            waiting.extend(one.operands)
        return True

    def _value(self, value: Value) -> str:
        """The register of a value: of `self.lanes` lanes where it is a vector, else a scalar."""
        found = self._find(value)
        if found is not None:
            return found
        width = self.lanes if self.is_vector[value] else 1
        with self.b.lanes(width):
            row = self.row_of.get(value)
            if row is None:
                register = self._made(value, width)
            else:
                register = self._kept(value, row, width)
        self.known[-1][value] = register
        return register

    # --- functions that several passes over a row need -------------------------------------------

    def _keep_row_values(self) -> None:
        """Memory for a row of each function that more than one pass reads: computed once.

        A row stays in the nearest cache, and a load is a tenth of an exponential.
        """
        inner = list(range(self.depth, len(self.space.extents)))
        if not self.reductions or inner != [self.vector]:
            return
        extent = self.space.extents[self.vector]
        if self.vector in self.open or extent > LONGEST_KEPT_ROW:
            return
        full = [s.value for s in self.kernel.stores if not self._is_short(s)]
        passes = [self._read_by(value.operands) for value in self.reductions]
        passes.append(self._read_by(tuple(full)))
        room = -(-extent // self._step) * self._step
        for value in self.order:
            is_costly = value.kind == "cell" and value.op in COSTLY and self.is_vector[value]
            if is_costly and sum(value in read for read in passes) > 1:
                type = FORMS[value.dtype].computed
                self.row_of[value] = self.b.effect(f"alloca [{room} x {type}], align 64")

    def _is_short(self, store: Store) -> bool:
        """Whether a store is made once for each row."""
        return all(v < self.kernel.depth for v, _ in store.offset.terms)

    def _read_by(self, roots: tuple[Value, ...]) -> set[Value]:
        """What one pass computes: nothing behind a reduction."""
        seen: set[Value] = set()
        waiting = list(roots)
        while waiting:
            value = waiting.pop()
            if value not in seen and value.kind != "reduced":
                seen.add(value)
                waiting.extend(value.operands)
        return seen

    def _kept(self, value: Value, row: str, width: int) -> str:
        type = FORMS[value.dtype].computed
        address = self.b.address(row, self.variables[self.vector], type)
        if value in self.row_is_there:
            return self.b.effect(f"load {self.b.of(type)}, ptr {address}, align 4")
        register = self._made(value, width)
        self.b.emit(f"store {self.b.of(type)} {register}, ptr {address}, align 4")
        self.row_being_made.add(value)
        return register

    def lanes_of(self, value: Value, width: int) -> str:
        """The register of a value with so many lanes."""
        register = self._value(value)
        if self.is_vector[value] or width == 1:
            return register
        with self.b.lanes(width):
            return self.b.splat(FORMS[value.dtype].computed, register)

    def _made(self, value: Value, width: int) -> str:
        form = FORMS[value.dtype]
        if value.kind == "constant":
            return self.arguments.literal(value)
        if value.kind == "position":
            return self._position(self.space.form(value.data), width)
        if value.kind == "load":
            return self._load(value, form)
        if value.kind == "lookup":
            return self._lookup(value, form, width)
        if value.kind == "random":
            form, bits, stream = value.data
            seed = self.lanes_of(value.operands[0], 1)
            position = self._position(self.space.form(form), width)
            return random_bits(self.b, seed, position, bits, stream)
        operands = [self.lanes_of(x, width) for x in value.operands]
        if value.kind == "choose":
            condition = self._inside(value.guards, width)
            return self.b.select(condition, form.computed, *operands)
        assert value.kind == "cell", value.kind
        if value in self.checks:
            return self._checked(value, operands, width)
        return computed(self.b, value, operands)

    def _uniform(self, form: Affine) -> str:
        """The part of a form that is the same for every lane, the vector variable at lane 0."""
        total = str(form.constant)
        for v, c in form.terms:
            total = self.b.add(self.b.multiply(self.variables[v], self._factor(v, c)), total)
        return total

    def _factor(self, variable: int, coefficient: int) -> int | str:
        """A coefficient, or an argument where it may be a multiple of an extent that is one."""
        if variable != 0 or variable == self.vector or not any(v > 0 for v in self.open):
            return coefficient
        return self.arguments.number(("coefficient", coefficient), coefficient)

    def _element(self, load: Value, offset: Affine) -> str:
        """Where a load begins, in elements from where its pointer does."""
        base = self._uniform(Affine(0, offset.terms))
        return self.b.add(base, self.arguments.constant_of(load))

    def _position(self, form: Affine, width: int) -> str:
        base, step = self._uniform(form), form.coefficient(self.vector)
        if width == 1:
            return base
        return self._stepping(base, step)

    def _stepping(self, base: str, step: int) -> str:
        """base, base + step, ... over the lanes, as i64."""
        type = self.b.of("i64")
        lanes = "<" + ", ".join(f"i64 {lane * step}" for lane in range(self.b.width)) + ">"
        return self.b.value(f"add {type} {self.b.splat('i64', base)}, {lanes}")

    def _inside(self, guards: tuple[Guard, ...], width: int) -> str:
        """i1 of `width` lanes: where all guards hold."""
        result = None
        for guard in guards:
            form, guard = self._guard(guard)
            if width > 1 and form.coefficient(self.vector):
                at = self._stepping(self._uniform(form), form.coefficient(self.vector))
                one = self._between(at, guard)
            else:
                with self.b.lanes(1):
                    one = self._between(self._uniform(form), guard)
                if width > 1:
                    one = self.b.splat("i1", one)
            result = one if result is None else self.b.binary("and", "i1", result, one)
        if result is None:
            return self.b.constant("i1", True)
        return result

    def _guard(self, guard: Guard) -> tuple[Affine, tuple[str, str]]:
        """A guard's form without its constant, and the bounds of that form."""
        form = self.space.form(guard.form)
        low, high = guard.low - form.constant, guard.high - form.constant
        names = (self.arguments.number(("low", guard), low), )
        names += (self.arguments.number(("high", guard), high), )
        return Affine(0, form.terms), names

    def _between(self, at: str, bounds: tuple[str, str]) -> str:
        low, high = (self.b.splat("i64", str(bound)) for bound in bounds)
        low = self.b.compare("sge", "i64", at, low)
        high = self.b.compare("slt", "i64", at, high)
        return self.b.binary("and", "i1", low, high)

    # --- memory ----------------------------------------------------------------------------------

    def _load(self, value: Value, form: Form) -> str:
        node, offset = value.data
        offset = self.space.form(offset)
        base = self._element(value, offset)
        return self._read(self.pointer[node], base, offset, value.guards, form)

    def _read(
        self, pointer: str, base: str, offset: Affine, guards: tuple[Guard, ...], form: Form
    ) -> str:
        """What is at `base`, and over the lanes where `offset` goes from there."""
        step = offset.coefficient(self.vector) if self.vector is not None else 0
        if self.b.width == 1:
            if guards:
                inside = self._inside(guards, 1)
                base = self.b.value(f"select i1 {inside}, i64 {base}, i64 0")
            address = self.b.address(pointer, base, form.stored)
            loaded = self.b.effect(f"load {form.stored}, ptr {address}, align {form.bytes}")
        elif step == 1:
            address = self.b.address(pointer, base, form.stored)
            loaded = access.load(self.b, address, form, self._load_mask(guards))
        else:
            positions = self._stepping(base, step)
            mask = self._load_mask(guards)
            loaded = access.gather(self.b, pointer, positions, form, mask)
        return from_memory(self.b, form, loaded)

    def _checked(self, value: Value, operands: list[str], width: int) -> str:
        """A cell that reports what it can not compute."""
        used = self.mask if width > 1 else None
        if value.guards:
            inside = self._inside(value.guards, width)
            used = inside if used is None else self.b.binary("and", "i1", inside, used)
        first = len(self.nodes) - len(self.checks)
        report = Report(f"%p{first}", self.checks[value])
        if value.op is ops.WRAP_INDEX:
            return wrapped(self.b, value.data, operands[0], used, report)
        type = FORMS[value.dtype].computed
        is_zero = self.b.compare("eq", type, operands[1], self.b.constant(type, 0))
        report_where(self.b, is_zero, used, report)
        return computed(self.b, value, operands)

    def _lookup(self, value: Value, form: Form, width: int) -> str:
        """What is in memory at an index that is computed."""
        node, offset, step, size = value.data
        (position,) = value.operands
        offset, pointer, b = self.space.form(offset), self.pointer[node], self.b
        if width == 1 or not self.is_vector[position]:
            with b.lanes(1):
                found = inside_of(b, self.lanes_of(position, 1), size)
                pointer = b.address(pointer, b.multiply(found, step), form.stored)
            return self._read(pointer, self._uniform(offset), offset, value.guards, form)
        found = inside_of(b, self.lanes_of(position, width), size)
        found = b.binary("mul", "i64", found, b.constant("i64", step))
        positions = b.binary("add", "i64", self._position(offset, width), found)
        mask = self._load_mask(value.guards)
        return from_memory(b, form, access.gather(b, pointer, positions, form, mask))

    def _load_mask(self, guards: tuple[Guard, ...]) -> str | None:
        if not guards:
            return self.mask
        inside = self._inside(guards, self.b.width)
        return inside if self.mask is None else self.b.binary("and", "i1", inside, self.mask)

    def _address(self, store: Store) -> str:
        with self.b.lanes(1):
            offset = self._uniform(self.space.form(store.offset))
            stored = FORMS[store.node.dtype].stored
            return self.b.address(self.target[store.node], offset, stored)

    def _add_to(self, store: Store) -> None:
        """One vector of a row, to that of the totals in memory."""
        form, address = FORMS[store.node.dtype], self._address(store)
        with self.b.lanes(self.lanes):
            one = self.lanes_of(store.value, self.lanes)
            total = access.load(self.b, address, form, self.mask)
            total = reduction.combine(self.b, store.sums, form, total, one)
            access.store(self.b, total, address, form, self.mask)

    def store(self, store: Store) -> None:
        if store.sums:
            self._add_to(store)
            return
        form = FORMS[store.node.dtype]
        offset = self.space.form(store.offset)
        is_vector = self.vector is not None and offset.coefficient(self.vector) != 0
        width = self.lanes if is_vector else 1
        with self.b.lanes(width):
            register = self.lanes_of(store.value, width)
            stored = to_memory(self.b, form, register)
            address = self._address(store)
            mask = self.mask if width > 1 else None
            if mask is None and store.node in self.streamed and self._is_aligned(offset):
                access.stream(self.b, stored, address, form)
            else:
                access.store(self.b, stored, address, form, mask)

    def _is_aligned(self, offset: Affine) -> bool:
        """Whether each vector of a buffer, itself aligned, lies at a multiple of its size."""
        rest = [c for v, c in offset.terms if v != self.vector]
        is_contiguous = offset.coefficient(self.vector) == 1
        return is_contiguous and all(c % self.lanes == 0 for c in (offset.constant, *rest))


class _Scope:
    """Values made inside are forgotten at its end, and so are variables that began inside."""

    def __init__(self, emitter: Emitter):
        self.emitter = emitter

    def __enter__(self) -> None:
        self.variables = dict(self.emitter.variables)
        self.emitter.known.append({})

    def __exit__(self, *error) -> None:
        self.emitter.known.pop()
        self.emitter.variables = self.variables
