"""The call of torch's own kernel by an extern node: its arguments, with holes for operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple


class Hole(NamedTuple):
    """The place of operand `operand`; `number`: the kernel wants it as a Python number."""

    operand: int
    number: bool

    def __repr__(self) -> str:
        return f"{'#' if self.number else '%'}{self.operand}"


class Template:
    """One call of an overload.

    Equal where the text is equal, so 1 and True are different arguments.

    Args:
        overload: "aten::sort.stable".
        args: Positional arguments; Hole | constant | tuple of these, a list being a tuple.
        kwargs: (name, argument) pairs.
        mutated: Positions and names of the arguments that the overload writes to.
        returned: True if it returns tensors besides those.
        present: For every result the call can have, whether it is defined.
        seed: The operand that holds the seed of a random overload, or None.
    """

    def __init__(
        self,
        overload: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...] = (),
        mutated: tuple[int | str, ...] = (),
        returned: bool = True,
        present: tuple[bool, ...] = (True,),
        seed: int | None = None,
    ) -> None:
        self.overload, self.args, self.kwargs = overload, args, kwargs
        self.mutated, self.returned, self.present, self.seed = mutated, returned, present, seed

    @cached_property
    def text(self) -> str:
        words = [repr(a) for a in self.args] + [f"{name}={a!r}" for name, a in self.kwargs]
        writes = f" writing {self.mutated}" if self.mutated else ""
        seed = f" seed %{self.seed}" if self.seed is not None else ""
        missing = "" if all(self.present) else f" giving {self.present}"
        return f"{self.overload}({', '.join(words)}){writes}{seed}{missing}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text


def fill(argument: Any, value_of: Callable[[Hole], Any]) -> Any:
    """`argument` with every hole replaced; tuples become the lists that torch's parser wants."""
    if isinstance(argument, Hole):
        return value_of(argument)
    if isinstance(argument, tuple):
        return [fill(a, value_of) for a in argument]
    return argument
