"""The messages of every kind of collective and their order: no data, no waiting.

A schedule is a sequence of steps of one member of a group, positions counted inside the group:
- (SHARE, _, a, b)      have room for elements a to b where the others can read them, until UNSHARE
- (PUT, _, a, b)        put them there; the other steps say elements of that room then
- (SEND, peer, a, b)    send elements a to b of what this member holds
- (REDUCE, _, a, b)     reduce elements a to b over everyone, in member order, which fixes the order
                        of a sum: those of the others are the next message from each
- (COPY, peer, a, b)    elements a to b become the next message from `peer`
- (JOIN, peer, a, b)    elements a to b become message op elements: a ring's running sum

In every schedule each message that is sent is received, in the order it was sent, and no member
sends more than a mailbox holds before it receives (tests/distributed/test_schedules.py).
"""

from __future__ import annotations

from collections.abc import Iterator

SHARE, PUT, UNSHARE = "share", "put", "unshare"
SEND, REDUCE, COPY, JOIN = "send", "reduce", "copy", "join"
Step = tuple[str, int, int, int]

# In the time in which one processor wakes another (30 us) a core reads and adds so many bytes (10 GB/s),
# and so many go over a network (10 Gbit/s).
HOP_BYTES, HOP_BYTES_OF_NETWORK = 300 << 10, 40 << 10


def one_hop_bytes(size: int, hop_bytes: int) -> int:
    """Up to which size each of `size` members reduces everything itself: one hop in place of two.

    It reads the operands of size - 1 others whole in place of a 1/size of each, which must take no
    longer than the second hop: than it takes for `hop_bytes`.
    """
    return hop_bytes * size // (size - 1) ** 2


def posted_bytes(size: int) -> int:
    """Up to which size it takes longer to hand a reduction to a thread than to do it.

    A member writes its operand once, and reads that of each.
    """
    return HOP_BYTES // (size + 1)


_AHEAD = 2  # pieces that a member of a ring sends before it receives one


def part(elements: int, size: int, position: int) -> tuple[int, int]:
    """The range of `elements` that is the share of one of `size` members."""
    share = -(-elements // size)
    return min(position * share, elements), min((position + 1) * share, elements)


def others(position: int, size: int) -> list[int]:
    """Every other member, the next one first, so that not all send to the same one at once."""
    return [(position + step) % size for step in range(1, size)]


def all_to_all_reduce(position: int, size: int, elements: int) -> Iterator[Step]:
    """Everyone reads everything and computes the same: one hop, O(size) messages."""
    yield SHARE, position, 0, elements
    yield PUT, position, 0, elements
    for peer in others(position, size):
        yield SEND, peer, 0, elements
    yield UNSHARE, position, 0, elements
    yield REDUCE, position, 0, elements


def direct_all_reduce(
    position: int, size: int, elements: int, message_elements: int
) -> Iterator[Step]:
    """Reduce this member's share of every piece in place; the other members read the result.

    O(size) messages of each member for each piece, two hops. Pieces overlap: while one is reduced,
    the next has arrived already, so that an early member has work to do.
    """
    piece = size * message_elements
    pieces = [(start, min(start + piece, elements)) for start in range(0, elements, piece)]

    def scatter(number: int) -> Iterator[Step]:
        if number < len(pieces):
            start, stop = pieces[number]
            yield SHARE, position, start, stop
            for peer in others(position, size):
                a, b = part(stop - start, size, peer)
                yield PUT, peer, start + a, start + b
                yield SEND, peer, start + a, start + b

    def reduce(number: int) -> Iterator[Step]:
        start, stop = pieces[number]
        a, b = part(stop - start, size, position)
        yield REDUCE, position, start + a, start + b
        for peer in others(position, size):
            yield SEND, peer, start + a, start + b
        yield UNSHARE, position, start, stop

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

    In pieces, so that one is reduced while others are on their way.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009.
    """
    following, previous = (position + 1) % size, (position - 1) % size
    hops = 2 * (size - 1)
    pieces = [
        _pieces(*part(elements, size, (position - hop) % size), message_elements)
        for hop in range(hops + 1)
    ]
    outgoing = [(SEND, following, *piece) for hop in pieces[:hops] for piece in hop]
    incoming = [
        (JOIN if hop < size else COPY, previous, *piece)
        for hop in range(1, hops + 1)
        for piece in pieces[hop]
    ]
    # what is received is sent on: this member is no further ahead than by pieces of its own
    ahead = min(len(pieces[0]), _AHEAD)
    yield from outgoing[:ahead]
    for number, step in enumerate(incoming):
        yield step
        yield from outgoing[number + ahead : number + ahead + 1]
    yield from outgoing[len(incoming) + ahead :]


def _pieces(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    return [(a, min(a + most, stop)) for a in range(start, stop, most)]


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
