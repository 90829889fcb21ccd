"""What a block may cost: where it costs more, an error with the explanations."""

from __future__ import annotations

import warnings
from contextlib import ContextDecorator

from ltc.debug import metrics
from ltc.errors import BudgetExceeded
from ltc.explaining import history
from ltc.explaining.explanation import COMPILES, CUTS, FALLBACKS, RECOMPILES, TIERS, Explanation

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

    compiles      programs that are compiled
    programs      programs that are new, compiled or not: by default they run uncompiled at first
    syncs         steps that are cut before their mark, by reads above all
    fallbacks     calls that run eagerly on the CPU
    transfers_mb  megabytes (of 2**20 bytes) copied to and from devices
    warn          warn in place of raising

    What is None may be any number. All threads of the process count. What is pending at the end of
    the block has cost nothing yet: mark the step inside. The error names what was exceeded, and why
    each of it happened; where the block raises itself, that error is left alone. It also decorates
    functions.

    >>> with ltc.budget(compiles=0, fallbacks=0, transfers_mb=1):
    ...     x = torch.ones(3).to("ltc")
    >>> try:
    ...     with ltc.budget(syncs=0):
    ...         total = x.exp().sum().item()
    ... except ltc.errors.BudgetExceeded as error:
    ...     print(str(error).splitlines()[0])
    This block was to cost no more than syncs=0; it cost syncs=1.
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
        rows = [f"This block was to cost no more than {allowed}; it cost {cost}."]
        return "\n".join(rows + list(map(str, block.told(over)[-MOST_TOLD:])))


class _Block:
    """What happens from here to `end`."""

    def __init__(self) -> None:
        self._heard: dict[str, list[Explanation]] = {}
        self._bytes = _transferred()
        self._grown = metrics.counted().__enter__()
        history.listen(self._hear)

    def _hear(self, explanation: Explanation) -> None:
        self._heard.setdefault(explanation.kind, []).append(explanation)

    def end(self) -> dict[str, float]:
        """What it cost, by the names of a budget."""
        history.leave(self._hear)
        self._grown.__exit__()
        moved = _transferred()
        moved -= self._bytes if moved >= self._bytes else 0  # else the metrics were cleared
        return {
            "compiles": self._grown["UncachedCompile"],
            "programs": self._grown["UncachedCompile"]
            - self._tier_ups()
            + self._grown["InterpretedPrograms"],
            "syncs": len(self._heard.get(CUTS, ())),
            "fallbacks": len(self._heard.get(FALLBACKS, ())),
            "transfers_mb": moved / _MEGABYTE,
        }

    def _tier_ups(self) -> int:
        """Programs that were compiled though they were not new."""
        return sum(self._grown[f"TierUp{reason}"] for reason in ("Repeated", "Paid", "Failed"))

    def told(self, names: list[str]) -> list[Explanation]:
        """Each explanation of what these names count, once."""
        kinds = {kind for name in names for kind in _TOLD[name]}
        heard = [one for kind, all in self._heard.items() if kind in kinds for one in all]
        return sorted(dict.fromkeys(heard), key=lambda one: one.moment)


def _transferred() -> float:
    found = map(metrics.metric_data, ("OutboundData", "InboundData"))
    return sum(data[1] for data in found if data is not None)
