"""Who sends what to whom, and in which order, for every kind of collective: no data, no waiting.

A schedule is a sequence of steps of one member of a group, positions counted inside the group:
- (SEND, peer, a, b)    send elements a to b of what this member holds
- (FOLD, peer, a, b)    combine the next message from `peer` with what was folded for a to b; a
                        member's own operand is its step with itself as the peer.  The steps of one
                        range follow one another in member order, which fixes the order of a sum
- (COPY, peer, a, b)    elements a to b become the next message from `peer`
- (JOIN, peer, a, b)    elements a to b become message op elements: a ring's running sum

In every schedule each message that is sent is received, in the order it was sent, and no member
sends more than a mailbox holds before it receives (tests/distributed/test_schedules.py).
"""

from __future__ import annotations

from collections.abc import Iterator

SEND, FOLD, COPY, JOIN = "send", "fold", "copy", "join"
Step = tuple[str, int, int, int]

# Below this many bytes each member sends everything to all: one hop in place of two.
ONE_HOP_BYTES = 16 << 10


def part(elements: int, size: int, position: int) -> tuple[int, int]:
    """The range of `elements` that is the share of one of `size` members."""
    share = -(-elements // size)
    return min(position * share, elements), min((position + 1) * share, elements)


def others(position: int, size: int) -> list[int]:
    """Every other member, the next one first, so that not all send to the same one at once."""
    return [(position + step) % size for step in range(1, size)]


def all_to_all_reduce(position: int, size: int, elements: int) -> Iterator[Step]:
    """Everyone gets everything and computes the same: one hop, O(size) messages."""
    for peer in others(position, size):
        yield SEND, peer, 0, elements
    for member in range(size):
        yield FOLD, member, 0, elements


def direct_all_reduce(
    position: int, size: int, elements: int, message_elements: int
) -> Iterator[Step]:
    """Each member sums its share of every piece and hands it round; pieces overlap.

    O(size) messages of each member for each piece, two hops.
    """
    piece = size * message_elements
    pieces = [(start, min(start + piece, elements)) for start in range(0, elements, piece)]

    def scatter(number: int) -> Iterator[Step]:
        if number < len(pieces):
            start, stop = pieces[number]
            for peer in others(position, size):
                a, b = part(stop - start, size, peer)
                yield SEND, peer, start + a, start + b

    def reduce(number: int) -> Iterator[Step]:
        start, stop = pieces[number]
        a, b = part(stop - start, size, position)
        for member in range(size):
            yield FOLD, member, start + a, start + b
        for peer in others(position, size):
            yield SEND, peer, start + a, start + b

    def gather(number: int) -> Iterator[Step]:
        start, stop = pieces[number]
        for peer in others(position, size):
            a, b = part(stop - start, size, peer)
            yield COPY, peer, start + a, start + b

    yield from scatter(0)
    yield from scatter(1)
    for number in range(len(pieces)):
        yield from reduce(number)
        if number > 0:
            yield from gather(number - 1)
        yield from scatter(number + 2)
    if pieces:
        yield from gather(len(pieces) - 1)


def ring_all_reduce(
    position: int, size: int, elements: int, message_elements: int
) -> Iterator[Step]:
    """2 * (size - 1) hops to the next member, each of 1 / size of the elements.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009.
    """
    following, previous = (position + 1) % size, (position - 1) % size
    for hop in range(2 * (size - 1)):
        action = JOIN if hop < size - 1 else COPY
        sent = part(elements, size, (position - hop) % size)
        received = part(elements, size, (position - hop - 1) % size)
        outgoing = _messages(SEND, following, *sent, message_elements)
        incoming = _messages(action, previous, *received, message_elements)
        while outgoing or incoming:  # in turn, so that no mailbox overflows
            yield from outgoing[:1]
            yield from incoming[:1]
            outgoing, incoming = outgoing[1:], incoming[1:]


def _messages(action: str, peer: int, start: int, stop: int, most: int) -> list[Step]:
    return [(action, peer, a, min(a + most, stop)) for a in range(start, stop, most)]


def tree_parent(position: int) -> int:
    """The member above in a binomial tree rooted at 0: the lowest set bit cleared."""
    return position & (position - 1)


def tree_children(position: int, size: int) -> list[int]:
    """The members below, the nearest subtree first: at most log2(size) of them."""
    found, bit = [], 1
    while not position & bit and position + bit < size:
        found.append(position + bit)
        bit <<= 1
    return found
