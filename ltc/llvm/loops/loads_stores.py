"""What a kernel loads, looks up and stores at one point."""

from __future__ import annotations

from ltc.ir import ops
from ltc.ir.loop_nest import Affine, Guard, Store, Value
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.conversions import from_memory, to_memory
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.elementwise import computed
from ltc.llvm.emit.index import Index
from ltc.llvm.loops import reduction_ops
from ltc.llvm.loops.bounds_checks import Report, inside_of, report_where, wrapped
from ltc.llvm.loops.values import PointValues


class PointMemory(PointValues):
    """Loads and stores of one point, or of one vector of points."""

    def _load(self, value: Value, form: Form) -> str:
        node, offset = value.data
        offset = self.space.form(offset)
        base = self._element(value, offset)
        return self._read(self.pointer[node], base, offset, value.guards, form)

    def _read(
        self, pointer: str, base: Index, offset: Affine, guards: tuple[Guard, ...], form: Form
    ) -> str:
        """What is at `base`, and over the lanes where `offset` goes from there."""
        step = offset.coefficient(self.vector) if self.vector is not None else 0
        if self.b.width == 1:
            if guards:
                inside = self._inside(guards, 1)
                base = self.b.where(inside, base, 0)
            address = self.b.address(pointer, base, form.stored)
            loaded = self.b.effect(f"load {form.stored}, ptr {address}, align {form.bytes}")
        elif step == 1:
            address = self.b.address(pointer, base, form.stored)
            loaded = memory_ops.load(self.b, address, form.stored, self._load_mask(guards))
        else:
            positions = self._stepping(base, step)
            mask = self._load_mask(guards)
            loaded = self._gathered(pointer, positions, form, mask)
        return from_memory(self.b, form, loaded)

    def _gathered(self, pointer: str, positions: str, form: Form, mask: str | None) -> str:
        pointers = memory_ops.addresses(self.b, pointer, positions, form.stored)
        return memory_ops.gather(self.b, pointers, form.stored, mask)

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
                pointer = b.address(pointer, b.index(found) * step, form.stored)
            return self._read(pointer, self._uniform(offset), offset, value.guards, form)
        found = inside_of(b, self.lanes_of(position, width), size)
        found = b.binary("mul", "i64", found, b.constant("i64", step))
        positions = b.binary("add", "i64", self._position(offset, width), found)
        mask = self._load_mask(value.guards)
        return from_memory(b, form, self._gathered(pointer, positions, form, mask))

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

    def register_of(self, store: Store) -> str:
        """What is stored, or added: a vector where it goes to more than one place."""
        width = self._width_of(store)
        with self.b.lanes(width):
            return self.lanes_of(store.value, width)

    def _width_of(self, store: Store) -> int:
        offset = self.space.form(store.offset)
        is_vector = self.vector is not None and offset.coefficient(self.vector) != 0
        return self.lanes if is_vector else 1

    def store(self, store: Store) -> None:
        register = self.register_of(store)
        if store.sums:
            form = FORMS[store.node.dtype]
            total = self._total(store)
            with self.b.lanes(self._width_of(store)):
                register = reduction_ops.combine(self.b, store.sums, form, total, register)
        self._put(store, register)

    def begin_sum(self, store: Store) -> None:
        """The first totals of a store that sums rows."""
        form = FORMS[store.node.dtype]
        with self.b.lanes(self._width_of(store)):
            first = self.b.constant(form.computed, reduction_ops.start(store.sums, form))
        self._put(store, first)

    def _total(self, store: Store) -> str:
        """What a store that sums rows has added up so far."""
        offset, form = self.space.form(store.offset), FORMS[store.node.dtype]
        with self.b.lanes(1):
            base = self._uniform(offset)
        with self.b.lanes(self._width_of(store)):
            return self._read(self.target[store.node], base, offset, (), form)

    def _put(self, store: Store, register: str) -> None:
        """One element or a vector of them, to wherever the store's offset has its places."""
        form = FORMS[store.node.dtype]
        offset, width = self.space.form(store.offset), self._width_of(store)
        with self.b.lanes(width):
            stored = to_memory(self.b, form, register)
            mask = self.mask if width > 1 else None
            if width > 1 and offset.coefficient(self.vector) != 1:
                positions = self._position(offset, width)
                pointers = memory_ops.addresses(
                    self.b, self.target[store.node], positions, form.stored
                )
                memory_ops.scatter(self.b, stored, pointers, form.stored, mask)
                return
            address = self._address(store)
            if mask is None and self._passes_caches(store, offset):
                memory_ops.stream(self.b, stored, address, form.stored)
            else:
                memory_ops.store(self.b, stored, address, form.stored, mask)

    def _passes_caches(self, store: Store, offset: Affine) -> bool:
        """Whether it is written for a later reader: totals are read again at the next row."""
        return store.node in self.streamed and not store.sums and self._is_aligned(offset)

    def _is_aligned(self, offset: Affine) -> bool:
        """Whether each vector of a buffer, itself aligned, lies at a multiple of its size."""
        rest = [c for v, c in offset.terms if v != self.vector]
        is_contiguous = offset.coefficient(self.vector) == 1
        return is_contiguous and all(c % self.lanes == 0 for c in (offset.constant, *rest))
