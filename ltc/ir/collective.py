"""What a collective is, wherever it is spoken of: recorded, in a graph, on the wire."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Collective:
    """One exchange among replicas, equal on all that take part.

    kind        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast",
                "send" or "receive"; in programs also "one_shot_sum": see ltc/ir/one_shot.py
    reduction   "sum", "mul", "and", "or", "min" or "max", where the kind reduces
    groups      ordinals that exchange among themselves; () means all together
    dim         along which the result is joined or cut; of all_to_all, the one that is cut
    other_dim   of all_to_all, the one along which the parts are joined
    root        of broadcast: whose value it is
    pairs       of permute: (from, to) ordinals; of send and receive: the one pair
    channel     whose replicas: "" for those of this run, else a process group's name
    parameters  of a sum of gradients: whose, where some of the optimizer's have none, as "0-3, 7"
    agreed      what else must be the same on all replicas, such as "scale 0.5"
    checked     how many of the last operands are no part of the exchange, but must be the same bits
                on all replicas: a scale that is another one in each step
    site        the user's line, for messages
    place       of a one-shot sum: the number of its slot in symmetric memory, the same on all
                members; else -1
    sharers     of a one-shot sum: how many members it has; else 0
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

    def text(self) -> str:
        """All but the line, as messages show it: "all_reduce sum groups ((0, 1), (2, 3))"."""
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
