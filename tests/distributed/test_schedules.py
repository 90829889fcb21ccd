"""Schedules: every message that is sent is received in order, mailboxes never overflow, sums are right."""

import collections

import pytest

from ltc.distributed.transport import collective_schedule
from ltc.distributed.transport.collective_schedule import COPY, JOIN, PUT, REDUCE, SEND, SHARE
from ltc.distributed.transport.shm_segment import SLOTS

SIZES = [2, 3, 4, 7, 8]
SCHEDULES = {
    "all_to_all": lambda p, n, e: collective_schedule.all_to_all_reduce(p, n, e),
    "direct": lambda p, n, e: collective_schedule.direct_all_reduce(p, n, e, 3),
    "ring": lambda p, n, e: collective_schedule.ring_all_reduce(p, n, e, 3),
}


def follow(steps_of: list, size: int, elements: int) -> list:
    """What every member holds in the end: for each element, the members it was summed over.

    A member waits where a mailbox is full or empty; nobody able to go on is a deadlock.
    """
    members = [Member(number, size, elements) for number in range(size)]
    boxes = collections.defaultdict(collections.deque)
    steps = [iter(s) for s in steps_of]
    now = [next(s, None) for s in steps]
    while any(step is not None for step in now):
        moved = False
        for member in members:
            step = now[member.number]
            if step is not None and member.can_do(step, boxes):
                member.do(step, boxes)
                now[member.number] = next(steps[member.number], None)
                moved = True
        assert moved, f"deadlock at {now}"
    assert not any(boxes.values()), "a message that nobody received"
    assert not any(member.shared for member in members)
    return [member.held for member in members]


class Member:
    """What one member holds, and what it lets the others read: a range, and the elements there."""

    def __init__(self, number: int, size: int, elements: int) -> None:
        self.number, self.size = number, size
        self.held: list = [(number,)] * elements
        self.shared: dict[tuple[int, int], list] = {}

    def can_do(self, step: tuple, boxes) -> bool:
        action, peer, _, _ = step
        if action == SEND:
            return len(boxes[self.number, peer]) < SLOTS
        if action in (COPY, JOIN):
            return bool(boxes[peer, self.number])
        return action != REDUCE or all(boxes[p, self.number] for p in self._others())

    def do(self, step: tuple, boxes) -> None:
        action, peer, a, b = step
        if action == SHARE:
            self.shared[a, b] = [None] * (b - a)
            assert len(self.shared) <= 2, "more than there is memory for"
        elif action == SEND:
            boxes[self.number, peer].append(self._readable(a, b))
        elif action == PUT:
            self._show(a, b)
        elif action == REDUCE:
            given = [
                self.held[a:b] if p == self.number else boxes[p, self.number].popleft()
                for p in range(self.size)
            ]
            assert all(len(content) == b - a for content in given), "a message of another size"
            self.held[a:b] = [sum(parts, ()) for parts in zip(*given)]
            self._show(a, b)
        elif action in (COPY, JOIN):
            content = boxes[peer, self.number].popleft()
            assert len(content) == b - a, "a message of another size"
            own = self.held[a:b] if action == JOIN else [()] * (b - a)
            self.held[a:b] = [x + y for x, y in zip(content, own)]
        else:
            del self.shared[a, b]

    def _others(self) -> list[int]:
        return [p for p in range(self.size) if p != self.number]

    def _readable(self, a: int, b: int) -> list:
        """Of a schedule that shares, only what was put there; nothing of a ring's is shared."""
        for (start, stop), content in self.shared.items():
            if start <= a and b <= stop:
                assert None not in content[a - start : b - start], "sent before it was put there"
                return content[a - start : b - start]
        return self.held[a:b]

    def _show(self, a: int, b: int) -> None:
        for (start, stop), content in self.shared.items():
            if start <= a and b <= stop:
                content[a - start : b - start] = self.held[a:b]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("elements", [1, 5, 64])
def test_every_member_ends_with_everyones_sum(name, size, elements):
    steps = [list(SCHEDULES[name](p, size, elements)) for p in range(size)]
    held = follow(steps, size, elements)
    for one in held:
        assert one == held[0]  # summed in the same order, so the same bits
        assert all(sorted(members) == list(range(size)) for members in one)
    if name != "ring":
        assert all(members == tuple(range(size)) for members in held[0])


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_sends_each_element_less_than_twice(size):
    steps = collective_schedule.ring_all_reduce(0, size, 840, 100)
    sent = sum(b - a for action, _, a, b in steps if action == SEND)
    assert sent == 2 * (size - 1) * 840 // size


def test_parts_cover_everything_once():
    for elements in (0, 1, 7, 100):
        for size in SIZES:
            ranges = [collective_schedule.part(elements, size, p) for p in range(size)]
            assert [i for a, b in ranges for i in range(a, b)] == list(range(elements))
