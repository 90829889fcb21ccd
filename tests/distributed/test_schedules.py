"""Schedules: every message that is sent is received in order, mailboxes never overflow, sums are right."""

import collections

import pytest

from ltc.distributed.transport import collective_schedule
from ltc.distributed.transport.collective_schedule import COPY, FOLD, JOIN, SEND
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
    held = [[(m,) for _ in range(elements)] for m in range(size)]
    source = [list(h) for h in held]
    folded: list = [[() for _ in range(elements)] for _ in range(size)]
    boxes = collections.defaultdict(collections.deque)
    steps = [iter(s) for s in steps_of]
    now = [next(s, None) for s in steps]
    owned: list = [set() for _ in range(size)]
    ring = is_ring(steps_of)
    while any(step is not None for step in now):
        moved = False
        for member in range(size):
            if now[member] is None:
                continue
            action, peer, a, b = now[member]
            if action == SEND:
                box = boxes[member, peer]
                if len(box) == SLOTS:
                    continue
                mine = held if (a, b) in owned[member] or ring else source
                box.append(mine[member][a:b])
            elif peer == member:
                _fold(folded[member], [(member,)] * (b - a), a)
            else:
                box = boxes[peer, member]
                if not box:
                    continue
                content = box.popleft()
                assert len(content) == b - a, "a message of another size"
                if action == COPY:
                    held[member][a:b] = content
                elif action == JOIN:
                    held[member][a:b] = [x + y for x, y in zip(content, held[member][a:b])]
                else:
                    _fold(folded[member], content, a)
            if action == FOLD and peer == size - 1:
                held[member][a:b] = folded[member][a:b]
                owned[member].add((a, b))
            now[member] = next(steps[member], None)
            moved = True
        assert moved, f"deadlock at {now}"
    assert not any(boxes.values()), "a message that nobody received"
    return held


def is_ring(steps_of: list) -> bool:
    return any(action == JOIN for steps in steps_of for action, *_ in steps)


def _fold(target: list, content: list, start: int) -> None:
    for i, members in enumerate(content):
        target[start + i] = target[start + i] + members


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
