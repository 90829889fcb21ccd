"""The loop variables of a kernel: neighbours that always move together are one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from ltc.ir.loop_nest import READS, Affine, Kernel, Store, Value


class Space:
    """The variables of a nest after neighbours that always move together are merged.

    Attributes:
        extents: The extents of the new variables.
        depth: Number of new variables before the boundary.
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
        self._forms: dict[Affine, Affine] = {}

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
        found = self._forms.get(form)
        if found is None:
            terms = tuple((self._new[v], c) for v, c in form.terms if v in self._new)
            found = self._forms[form] = Affine(form.constant, tuple(sorted(terms)))
        return found


@dataclass(frozen=True, eq=False)
class Nest:
    """A kernel in the variables of its space.

    Attributes:
        order: Its values, operands first.
        reductions: The values that loops reduce.
        summed: The variables of rows that its stores add up.
    """

    kernel: Kernel
    order: tuple[Value, ...]
    space: Space
    reductions: tuple[Value, ...]
    summed: tuple[int, ...]

    @property
    def extents(self) -> list[int]:
        return self.space.extents

    @property
    def depth(self) -> int:
        """Return how many variables stay when the reductions are done."""
        return self.space.depth

    @property
    def inner(self) -> list[int]:
        """The variables that reductions run over."""
        return list(range(self.space.depth, len(self.space.extents)))

    def loads(self) -> list[Value]:
        return [value for value in self.order if value.kind == "load"]

    def offset(self, read: Value) -> Affine:
        """Return where a value that reads memory does so."""
        return self.space.form(read.data[1])

    def is_made_once_a_row(self, store: Store) -> bool:
        return all(v < self.kernel.depth for v, _ in store.offset.terms)


def nest_of(kernel: Kernel, boundary: int = 0) -> Nest:
    """The kernel in as few variables as it needs.

    Args:
        boundary: Variables before it and from it on are never joined; 0: where the reductions
            begin.
    """
    order = kernel.values()
    space = Space(kernel, forms_of(order, kernel.stores), boundary or kernel.depth)
    reductions = tuple(value for value in order if value.kind == "reduced")
    return Nest(kernel, order, space, reductions, tuple(space.renumbered(kernel.summed())))


def forms_of(values: Iterable[Value], stores: tuple[Store, ...]) -> list[Affine]:
    forms = [store.offset for store in stores]
    for value in values:
        forms.extend(forms_of_value(value))
    return forms


def forms_of_value(value: Value) -> list[Affine]:
    """Return the forms of its reads, its positions and its guards; without its operands'."""
    forms = [guard.form for guard in value.guards]
    if value.kind in READS:
        forms.append(value.data[1])
    elif value.kind in ("position", "random"):
        forms.append(position_of(value))
    return forms


def position_of(value: Value) -> Affine:
    return value.data if value.kind == "position" else value.data[0]
