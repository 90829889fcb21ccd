"""The loop variables of a kernel: neighbours that always move together are one."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ltc.ir.loop_nest import READS, Affine, Kernel, Store, Value


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


def forms_of(values: Iterable[Value], stores: tuple[Store, ...]) -> list[Affine]:
    forms = [store.offset for store in stores]
    for value in values:
        forms.extend(guard.form for guard in value.guards)
        if value.kind in READS:
            forms.append(value.data[1])
        elif value.kind in ("position", "random"):
            forms.append(position_of(value))
    return forms


def position_of(value: Value) -> Affine:
    return value.data if value.kind == "position" else value.data[0]
