"""Budgets: a block that costs more raises an error with the explanations."""

from __future__ import annotations

import warnings
from contextlib import ContextDecorator

from ltc.errors import BudgetExceeded
from ltc.explaining import history
from ltc.explaining.explanation import COMPILES, CUTS, FALLBACKS, RECOMPILES, TIERS, Explanation
from ltc.support.observation import metrics

MOST_TOLD = 10  # explanations in the text of an error
_TOLD = {
    "compiles": (COMPILES, RECOMPILES, TIERS),
    "programs": (COMPILES, RECOMPILES),
    "syncs": (CUTS,),
    "fallbacks": (FALLBACKS,),
    "transfers_mb": (),
}
_MEGABYTE = 1 << 20


class budget(ContextDecorator):
    """`with ltc.budget(compiles=0, syncs=1):` raises BudgetExceeded where the block costs more.

    A limit of None allows any number. All threads of the process count. Work that is pending at the
    end of the block has cost nothing yet: mark the step inside. The error names each limit that was
    exceeded, and the reasons. An error that the block itself raises is passed on. It also
    decorates functions.

    Args:
        compiles: Programs that are compiled.
        programs: Programs that are new, compiled or not: by default they run uncompiled at first.
        syncs: Steps that are cut before their mark, by reads above all.
        fallbacks: Calls that run eagerly on the CPU.
        transfers_mb: Megabytes (of 2**20 bytes) copied to and from devices.
        warn: Warn in place of raising.

    Example:
        >>> with ltc.budget(compiles=0, fallbacks=0, transfers_mb=1):
        ...     x = torch.ones(3).to("ltc")
        >>> try:
        ...     with ltc.budget(syncs=0):
        ...         total = x.exp().sum().item()
        ... except ltc.errors.BudgetExceeded as error:
        ...     print(str(error).splitlines()[0])
        The budget of this block is syncs=0; it cost syncs=1.
    """

    def __init__(
        self,
        compiles: int | None = None,
        programs: int | None = None,
        syncs: int | None = None,
        fallbacks: int | None = None,
        transfers_mb: float | None = None,
        warn: bool = False,
    ) -> None:
        self._allowed = {
            "compiles": compiles,
            "programs": programs,
            "syncs": syncs,
            "fallbacks": fallbacks,
            "transfers_mb": transfers_mb,
        }
        self._warns = warn
        self._blocks: list[_Block] = []  # a budget may be entered inside itself

    def __enter__(self) -> budget:
        self._blocks.append(_Block())
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        block = self._blocks.pop()
        spent = block.end()
        over = [
            name for name, most in self._allowed.items() if most is not None and spent[name] > most
        ]
        if not over or kind is not None:
            return
        text = self._text(over, spent, block)
        if not self._warns:
            raise BudgetExceeded(text, block.told(over))
        warnings.warn(text, stacklevel=2)

    def _text(self, over: list[str], spent: dict[str, float], block: _Block) -> str:
        allowed = ", ".join(f"{name}={self._allowed[name]}" for name in over)
        cost = ", ".join(f"{name}={spent[name]:.4g}" for name in over)
        rows = [f"The budget of this block is {allowed}; it cost {cost}."]
        return "\n".join(rows + list(map(str, block.told(over)[-MOST_TOLD:])))


class _Block:
    """The events from here to `end`."""

    def __init__(self) -> None:
        self._heard: dict[str, list[Explanation]] = {}
        self._bytes = _transferred()
        self._grown = metrics.counted().__enter__()
        history.listen(self._hear)

    def _hear(self, explanation: Explanation) -> None:
        self._heard.setdefault(explanation.kind, []).append(explanation)

    def end(self) -> dict[str, float]:
        """End the block and return its costs, by the names of a budget."""
        history.leave(self._hear)
        self._grown.__exit__()
        moved = _transferred()
        moved -= self._bytes if moved >= self._bytes else 0  # else the metrics were cleared
        return {
            "compiles": self._grown["UncachedCompile"],
            "programs": self._grown["UncachedCompile"]
            - self._grown["TierUp"]  # not new
            + self._grown["UncompiledPrograms"],
            "syncs": len(self._heard.get(CUTS, ())),
            "fallbacks": len(self._heard.get(FALLBACKS, ())),
            "transfers_mb": moved / _MEGABYTE,
        }

    def told(self, names: list[str]) -> list[Explanation]:
        """Return each explanation that these names count, once."""
        kinds = {kind for name in names for kind in _TOLD[name]}
        heard = [one for kind, all in self._heard.items() if kind in kinds for one in all]
        return sorted(dict.fromkeys(heard), key=lambda one: one.moment)


def _transferred() -> float:
    found = map(metrics.metric_data, ("OutboundData", "InboundData"))
    return sum(data[1] for data in found if data is not None)
