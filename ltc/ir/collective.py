"""The definition of a collective for all its forms: recorded, in a graph, on the wire."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Collective:
    """One exchange among replicas, equal on all that take part.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast",
            "send" or "receive"; in programs also "one_shot_sum": see ltc/ir/one_shot.py.
        reduction: "sum", "mul", "and", "or", "min" or "max", where the kind reduces.
        groups: Ordinals that exchange among themselves; () means all together.
        dim: The dimension along which the result is joined or cut; all_to_all cuts along it.
        other_dim: The dimension along which all_to_all joins the parts.
        root: The ordinal that broadcasts its value.
        pairs: (from, to) ordinals of a permute; the one pair of a send or receive.
        channel: "" for the replicas of this run, else the name of a process group.
        parameters: The parameters of a sum of gradients, as "0-3, 7"; "" if all of the optimizer's
        have gradients.
        agreed: Other facts that must be the same on all replicas, such as "scale 0.5".
        checked: Number of last operands that are not exchanged, but must be the same bits on all
        replicas: a scale that differs from step to step.
        site: The user's line, for messages.
        place: The number of a one-shot sum's slot in symmetric memory, the same on all members;
        else -1.
        sharers: The number of a one-shot sum's members; else 0.
    """

    kind: str
    reduction: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    dim: int = 0
    other_dim: int = 0
    root: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    channel: str = ""
    parameters: str = ""
    agreed: str = ""
    checked: int = 0
    site: str = ""
    place: int = -1
    sharers: int = 0

    def is_among_all(self) -> bool:
        """Return True if all replicas of the run take part, in groups or together."""
        return not self.channel and self.kind not in ("send", "receive")

    def text(self) -> str:
        """Return all but the line for messages: "all_reduce sum groups ((0, 1), (2, 3))"."""
        parts = [self.kind, self.reduction]
        for name in (
            "groups",
            "dim",
            "other_dim",
            "root",
            "pairs",
            "channel",
            "parameters",
            "agreed",
        ):
            value = getattr(self, name)
            if value:
                parts.append(value if name == "agreed" else f"{name} {value}")
        return " ".join(part for part in parts if part)

    def __str__(self) -> str:
        return self.text().replace(" ", "_")  # one word in the text of a graph

    def at(self, site: str) -> Collective:
        """The same, called at another line."""
        return replace(self, site=site)
