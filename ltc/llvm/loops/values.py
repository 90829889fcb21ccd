"""What a kernel computes at one point: each value in the outermost loop that has all it depends on.

A value is a vector of lanes where it depends on the vector variable, else a scalar.
"""

from __future__ import annotations

from ltc.ir.loop_nest import Affine, Guard, Store, Value
from ltc.llvm.emit.builder import multiples
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.elementwise import COSTLY, computed
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.philox import adjacent_bits, random_bits

MOST_CHOICES = 8  # of one point that are all computed: from here on a branch takes less time
LONGEST_KEPT_ROW = 4096  # elements: a quarter of a first-level cache
ACCUMULATORS = 4  # vectors: additions depend on one another only every fourth time


class PointValues:
    """Instructions for the values of one point, or of one vector of points.

    Whoever uses it moves the variables: it holds the register of each value in the scopes of the
    loops around it, and the mask of the lanes that are inside.
    """

    @property
    def _step(self) -> int:
        """Elements that the accumulators take in at once."""
        return ACCUMULATORS * self.lanes

    def _scope(self):
        return Scope(self)

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
        passes = [self._read_by(value.operands) for value in self.walking]
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
            return self._random(value, width)
        if value.kind == "choose" and self._branches(value):
            return self._branched(value, form, width)
        operands = [self.lanes_of(x, width) for x in value.operands]
        if value.kind == "choose":
            condition = self._inside(value.guards, width)
            return self.b.select(condition, form.computed, *operands)
        assert value.kind == "cell", value.kind
        if value in self.checks:
            return self._checked(value, operands, width)
        return computed(self.b, value, operands)

    def _random(self, value: Value, width: int) -> str:
        form, bits, stream = value.data
        seed, form = self.lanes_of(value.operands[0], 1), self.space.form(form)
        steps = [c for v, c in form.terms if v != self.vector]
        whole_blocks = all(step % 4 == 0 for step in (form.constant, width, *steps))
        if width > 1 and bits <= 32 and form.coefficient(self.vector) == 1 and whole_blocks:
            return adjacent_bits(self.b, seed, self._uniform(form), bits, stream)
        return random_bits(self.b, seed, self._position(form, width), bits, stream)

    def _branches(self, choice: Value) -> bool:
        """Whether only what is chosen is computed: one of many parts, the same for all lanes."""
        many = sum(value.kind == "choose" for value in self.order) > MOST_CHOICES
        forms = [self.space.form(guard.form) for guard in choice.guards]
        return many and all(form.coefficient(self.vector) == 0 for form in forms)

    def _branched(self, choice: Value, form: Form, width: int) -> str:
        inside, outside = choice.operands
        other = self.lanes_of(outside, width)
        with self.b.lanes(1):
            condition = self._inside(choice.guards, 1)

        def then() -> list[str]:
            with self._scope():
                return [self.lanes_of(inside, width)]

        (result,) = self.b.when(condition, [(self.b.of(form.computed), other)], then)
        return result

    def _uniform(self, form: Affine) -> Index:
        """The part of a form that is the same for every lane, the vector variable at lane 0."""
        total: Index = form.constant
        for v, c in form.terms:
            total = self.variables[v] * self._factor(v, c) + total
        return total

    def _factor(self, variable: int, coefficient: int) -> Index:
        """A coefficient, or an argument where it may be a multiple of an extent that is one."""
        if variable != 0 or variable == self.vector or not any(v > 0 for v in self.open):
            return coefficient
        return self.arguments.number(("coefficient", coefficient), coefficient)

    def _element(self, load: Value, offset: Affine) -> Index:
        """Where a load begins, in elements from where its pointer does."""
        base = self._uniform(Affine(0, offset.terms))
        return base + self.arguments.constant_of(load)

    def _position(self, form: Affine, width: int) -> Index | str:
        base, step = self._uniform(form), form.coefficient(self.vector)
        if width == 1:
            return base
        return self._stepping(base, step)

    def _stepping(self, base: Index, step: int) -> str:
        """base, base + step, ... over the lanes, as i64."""
        type = self.b.of("i64")
        lanes = multiples(self.b.width, step, "i64")
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

    def _guard(self, guard: Guard) -> tuple[Affine, tuple[Index, Index]]:
        """A guard's form without its constant, and the bounds of that form."""
        form = self.space.form(guard.form)
        low, high = guard.low - form.constant, guard.high - form.constant
        bounds = (
            self.arguments.number(("low", guard), low),
            self.arguments.number(("high", guard), high),
        )
        return Affine(0, form.terms), bounds

    def _between(self, at: Index | str, bounds: tuple[Index, Index]) -> str:
        low, high = (self.b.splat("i64", bound) for bound in bounds)
        low = self.b.compare("sge", "i64", at, low)
        high = self.b.compare("slt", "i64", at, high)
        return self.b.binary("and", "i1", low, high)


class Scope:
    """Values made inside are forgotten at its end, and so are variables that began inside."""

    def __init__(self, emitter: PointValues):
        self.emitter = emitter

    def __enter__(self) -> None:
        self.variables = dict(self.emitter.variables)
        self.emitter.known.append({})

    def __exit__(self, *error) -> None:
        self.emitter.known.pop()
        self.emitter.variables = self.variables
