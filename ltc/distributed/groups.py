"""The groups of replicas that exchange: all together, or the groups that a call names."""

from __future__ import annotations

from collections.abc import Sequence

from ltc.distributed import world

Groups = Sequence[Sequence[int]] | None


def replica_count() -> int:
    """Replicas that exchange with the calling thread's, itself among them.

    Example:
        >>> from ltc.distributed import collectives
        >>> collectives.replica_count()
        1
    """
    return world.place().replicas


def ordinal() -> int:
    """This replica's number among them.

    Example:
        >>> from ltc.distributed import collectives
        >>> collectives.ordinal()
        0
    """
    return world.place().ordinal


def group_of(groups: Groups) -> tuple[int, ...]:
    """The ordinals of the calling thread's group, in order.

    Args:
        groups: Lists of ordinals; None: all together.

    Raises:
        ValueError: If the replica is in none of them; what `frozen` raises.

    Example:
        >>> from ltc.distributed import collectives
        >>> collectives.group_of(None), collectives.group_of([[0]])
        ((0,), (0,))
    """
    place = world.place()
    if not groups:
        return tuple(range(place.replicas))
    return next(group for group in frozen(groups) if place.ordinal in group)


def require_replica(call: str, named: int) -> None:
    """Raise ValueError where there is no replica of that number."""
    if not 0 <= named < replica_count():
        raise ValueError(f"{call} names replica {named}: ordinals are 0 to {replica_count() - 1}.")


def require_other(call: str, named: int) -> None:
    """Raise ValueError where there is no replica of that number, or it is this one."""
    require_replica(call, named)
    if named == ordinal():  # no wire would carry the message
        raise ValueError(f"{call} names replica {named}, which is this one: use the tensor itself.")


def frozen(groups: Groups) -> tuple[tuple[int, ...], ...]:
    """The groups as tuples, () for all together.

    Raises:
        AssertionError: If they differ in size.
        ValueError: Unless they name each replica once.
    """
    if not groups:
        return ()
    found = tuple(tuple(int(ordinal) for ordinal in group) for group in groups)
    if len({len(group) for group in found}) > 1:
        raise AssertionError(
            f"groups must have one size, since their results have one shape: {groups}"
        )
    named = [ordinal for group in found for ordinal in group]
    if sorted(named) != list(range(replica_count())):
        raise ValueError(
            f"groups {groups} must name each of the {replica_count()} replicas exactly once"
        )
    return found
