"""What rules and statements tell of a call's sizes, beside what PyTorch tells of its results.

Numbers are compared as they are.  Then each size of the operands becomes a symbol, and the expressions are
compared at other sizes, wherever their guards hold.
"""

import warnings

from torch.utils._pytree import tree_leaves, tree_map

from ltc.aten.call import Call
from ltc.aten.result_shapes import result_shapes
from ltc.device.shapes import meta
from ltc.errors import Unsupported
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import SMALLEST, Extent, SizeTrace
from tests.unit.recorded_calls import Tensor, is_tensor, recorded

REFUSED, LEFT = "refused", "left"
# What the sizes become that stand for other sizes than a sample has.
CHANGES = (lambda n: n + 1, lambda n: 2 * n, lambda n: n + 5, lambda n: n - 1, lambda n: n // 2)


def types_by_torch(question: tuple) -> tuple | str:
    """Types of the results, or REFUSED."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return meta._infer(Call(*question))
        except meta.NoTypes:
            return REFUSED


def shapes_of(question: tuple, types: tuple) -> tuple | str:
    """Shapes of the results by the rule, or LEFT where it leaves the call to PyTorch's kernel."""
    try:
        return result_shapes(Call(*question), [None if t is None else t[1] for t in types])
    except Unsupported as error:
        return LEFT if "no rule gives the sizes" in str(error) else f"fails: {error}"


class Compared:
    """One call compared.

    kind   "equal", LEFT, REFUSED (by PyTorch), "fails"
    wrong  how sizes differ, in words; None where they do not
    moved  at how many other sizes the expressions were compared
    fixed  whether some size became a number for the rule
    """

    def __init__(self, name: str, values: list) -> None:
        self.name, self.values, self.moved, self.fixed = name, values, 0, False
        self.wrong: str | None = None
        self._question = recorded(name, values)
        self.types = types_by_torch(self._question)
        self.kind = REFUSED if self.types == REFUSED else self._at_numbers()
        if self.kind == "equal":
            self._as_expressions()

    def _at_numbers(self) -> str:
        found = shapes_of(self._question, self.types)
        if isinstance(found, str):
            return LEFT if found == LEFT else "fails"
        expected = tuple(None if t is None else t[0] for t in self.types)
        if found != expected:
            self.wrong = f"{self.name}{self.values}: {found}, not {expected}"
        return "equal"

    def _as_expressions(self) -> None:
        tensors = dict.fromkeys(
            leaf for leaf in tree_leaves(self.values, is_leaf=is_tensor) if is_tensor(leaf)
        )
        sizes = sorted({n for t in tensors for n in t.shape if n >= SMALLEST})
        trace = SizeTrace()
        symbol = {n: trace.symbol(n) for n in sizes}
        with tracing(trace):
            question = recorded(self.name, _resized(self.values, symbol))
            found = shapes_of(question, self.types)
        if isinstance(found, str):
            self.fixed = True
            return
        text = ", ".join("None" if s is None else _text(s) for s in found)
        at, holds = trace.function(f"({text},)"), trace.function(_guards(trace))
        self.fixed = any(" == " in guard and "not" not in guard for guard in trace.guards)
        for change in CHANGES:
            other = [change(n) for n in sizes]
            if sizes and min(other) >= SMALLEST and holds(*other):
                self._compare_at(dict(zip(sizes, other)), at(*other))

    def _compare_at(self, sizes: dict[int, int], found: tuple) -> None:
        values = _resized(self.values, sizes)
        types = types_by_torch(recorded(self.name, values))
        self.moved += 1
        expected = types if types == REFUSED else tuple(t and t[0] for t in types)
        if found != expected:
            self.wrong = f"{self.name}{values}, as expressions: {found}, not {expected}"


def _resized(values: list, sizes: dict) -> list:
    """The arguments with other sizes of tensors; numbers are left as they are."""
    made: dict = {}

    def other(leaf):
        if not is_tensor(leaf):
            return leaf
        if leaf not in made:
            made[leaf] = Tensor(tuple(sizes.get(n, n) for n in leaf.shape), leaf.dtype)
        return made[leaf]

    return tree_map(other, values, is_leaf=is_tensor)


def _text(shape: tuple) -> str:
    parts = [n.source if isinstance(n, Extent) else str(n) for n in shape]
    return f"({', '.join([*parts, ''])})" if parts else "()"


def _guards(trace: SizeTrace) -> str:
    return " and ".join(f"({guard})" for guard in trace.guards) or "True"
