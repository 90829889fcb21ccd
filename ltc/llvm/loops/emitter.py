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

from ltc.ir.loop_nest import READS, Kernel, Store, Value
from ltc.ir.node import Node
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import LANES, Builder, function_text
from ltc.llvm.emit.conversions import from_memory
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.emit.elementwise import COSTLY
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.emit.vectors import transposed
from ltc.llvm.loops.arguments import Arguments
from ltc.llvm.loops.bounds_checks import faults_of
from ltc.llvm.loops.iteration_space import Space, forms_of, position_of
from ltc.llvm.loops.transposed_rows import TurnedRows

STRIP = 2048  # elements of the innermost dimension in one unit
TASK_WORK = 1 << 15  # values that one task computes, at least: a few microseconds
MOST_TASKS = 64
COLUMNS_TOGETHER = 4  # vectors of columns that are reduced or computed at once
LONG_CHAIN = 100  # instructions: a processor looks some 200 ahead for what need not wait
INSTRUCTIONS_OF_A_FUNCTION = 25
MOST_VALUES_OF_A_TILE = 40  # each is computed once for every row of the tile
LONG_ROW = 1024  # elements from which on a row that is only reduced is as fast with any extent


def kernel_code(kernel: Kernel, streamed: frozenset[Node] = frozenset()) -> KernelCode:
    """The kernel's function; `streamed`: what it writes to memory past the caches."""
    emitter = LoopEmitter(kernel, streamed=streamed)
    wide = COLUMNS_TOGETHER * LANES
    if (emitter.reduces_columns or emitter.is_long_chain) and emitter.row_length >= wide:
        # Whole runs of cache lines from each row; vectors to work on while others wait.
        emitter = LoopEmitter(kernel, lanes=wide, streamed=streamed)
    return emitter.code()


class LoopEmitter(TurnedRows):
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
        self.space = Space(kernel, forms_of(self.order, kernel.stores), boundary or kernel.depth)
        self.depth = self.space.depth
        self.reductions = [v for v in self.order if v.kind == "reduced"]
        self.summed = self.space.renumbered(kernel.summed())
        self.turned = self._loads_to_turn()
        self.turned_at: dict[Value, str] = {}  # memory of the rows of a group
        self.turned_row: Index = 0  # of the group
        self.group = self._rows_of_a_group(self.turned) if self.turned else 0
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
        self.variables: dict[int, Index] = {}
        self.mask: str | None = None
        self.known: list[dict[Value, str]] = [{}]
        self.row_of: dict[Value, str] = {}  # memory of functions that several passes read
        self.row_being_made: set[Value] = set()
        self.following: list[tuple[Value, int]] = []  # what the pass under way fetches as well
        self.row_is_there: set[Value] = set()
        self.needs = self._needs()
        self.is_vector = self._vectors()
        self.single = self._single_terms()
        self.walking = [value for value in self.reductions if value not in self.single]

    def code(self) -> KernelCode:
        tasks = self._tasks()
        units = self.arguments.number("units", self._units())
        self.arguments.splat_constants(self.order, self.lanes)
        self._keep_row_values()
        self._reserve_turned()
        low, high = self.b.share(units)
        with self._scope():
            self._hoist([store.value for store in self.kernel.stores])
            self.b.loop(low, high, 1, (), lambda unit, _: self._unit(unit))
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
        is_open = {0} if not self.reductions or (depth != 0 and self.vector != 0) else set()
        if (self.transposes or self.turned) and last <= 1:
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

    # --- what depends on what --------------------------------------------------------------------

    def _vector_variable(self) -> int | None:
        """The variable that runs over lanes; None where there is no variable."""
        extents, depth = self.space.extents, self.depth
        if not extents:
            return None
        last = len(extents) - 1
        if not self.reductions or depth == 0 or depth > last or self.summed or self.turned:
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
                forms.append(position_of(value))
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
        rows = range(self.depth - 1 if self._has_strips or self.turned else self.depth)
        return [v for v in rows if v not in self.summed]

    def _strip(self) -> int:
        """Elements of the vector variable in one unit; narrow where columns are read."""
        return COLUMNS_TOGETHER * LANES if self.reductions or self.transposes else STRIP

    def _strips(self) -> int:
        if self.turned:
            return -(-self.space.extents[self.depth - 1] // self.group)
        return -(-self.space.extents[self.vector] // self._strip()) if self._has_strips else 1

    def _units(self) -> int:
        rows = prod(self.space.extents[v] for v in self._row_variables()) * self._strips()
        return rows // self.lanes if self.tiles else rows

    def _tasks(self) -> int:
        work = prod(self.space.extents) * max(1, len(self.order) // 8) * (1 + len(self.reductions))
        return max(1, min(self._units(), -(-work // TASK_WORK), MOST_TASKS))

    def _unit(self, unit: Index) -> None:
        rest, strips, strip = unit, self._strips(), 0
        rows = self._row_variables()
        if (self._has_strips or self.turned) and not rows:
            strip = unit
        elif strips > 1 and self.transposes:
            each = self.arguments.number("rows", self._units() // strips)
            rest, strip = unit % each, unit // each
        elif strips > 1:
            strip, rest = unit % strips, unit // strips
        self._locate(rows, rest)
        if self.tiles:  # what depends on this variable is not hoisted: each row has its own
            self.first_row = self.variables.pop(rows[-1]) * self.lanes
        with self._scope():
            self._hoist([store.value for store in self.kernel.stores])
            if self.turned:
                self._over_turned(strip)
            elif self._has_strips:
                self._over_strip(strip)
            elif self.summed:
                self._sum_rows()
            else:
                self._row()

    def _locate(self, variables: list[int], number: Index) -> None:
        """The variables of a row, from its number."""
        for v in reversed(variables[1:]):
            extent = self.space.extents[v]
            if self.tiles and v == variables[-1]:
                extent //= self.lanes
            self.variables[v], number = number % extent, number // extent
        if variables:
            self.variables[variables[0]] = number

    def at_rows(self, number: Index) -> None:
        """The variables before the boundary, from the number of a row."""
        self._locate(list(range(self.depth)), number)

    def _over_strip(self, strip: Index) -> None:
        extent, length = self.extent(self.vector), self._strip()
        first, limit = strip * length, extent
        if not isinstance(extent, int) or extent > length:
            limit = least(first + length, extent)
        body = self._tile if self.tiles else self._point
        self._over_vectors(first, limit, (), lambda carried: body())

    # --- one row, or one vector of them ----------------------------------------------------------

    def _tile(self) -> None:
        """A square of rows and lanes: what lies in columns is loaded so, and turned."""
        row, column = len(self.space.extents) - 2, self.variables[self.vector]
        turned = {load: self._turned(load, row, column) for load in self._column_loads()}
        for k in range(self.lanes):
            with self._scope():
                self.variables[row] = self.first_row + k
                for load, vectors in turned.items():
                    self.known[-1][load] = from_memory(self.b, FORMS[load.dtype], vectors[k])
                self._store_all(list(self.kernel.stores))

    def _turned(self, load: Value, row: int, column: Index) -> list[str]:
        """The stored elements of each row of the tile, one vector each."""
        node, offset = load.data
        form, offset = FORMS[load.dtype], self.space.form(offset)
        columns = []
        for k in range(self.lanes):
            with self._scope():
                self.variables[row] = self.first_row
                self.variables[self.vector] = column + k
                base = self._element(load, offset)
            address = self.b.address(self.pointer[node], base, form.stored)
            columns.append(memory_ops.load(self.b, address, form.stored))
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
        for store in sums:
            self.begin_sum(store)

    def _each_row(self, variables: list[int]) -> None:
        if not variables:
            self._row()
            return

        def one(i: Index, _) -> None:
            with self._scope():
                self.variables[variables[0]] = i
                self._hoist([store.value for store in self.kernel.stores])
                self._each_row(variables[1:])

        self.b.loop(0, self.extent(variables[0]), 1, (), one)

    def _row(self) -> None:
        inner = list(range(self.depth, len(self.space.extents)))
        together = self._columns_together()
        if together:
            self._reduce_columns(together, inner)
        for value in self.reductions[len(together) :]:
            self._hoist([value])
            if value in self.single:
                self._take_term(value)
                continue
            if value is self.walking[-1] and len(self.walking) > 1:
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
            base = self._element(load, self.space.form(offset)) + step
            address = self.b.address(self.pointer[node], base, FORMS[node.dtype].stored)
        self.b.prefetch(address)

    def _store_all(self, stores: list[Store]) -> None:
        if self.row_of:  # what a store finds in a row's memory it does not load: another one may
            for store in stores:  # want it after its place was written over
                self.register_of(store)
        for store in stores:
            self.store(store)
