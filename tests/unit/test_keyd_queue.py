import threading
from collections import deque

import pytest

from ltc.utils.keyd_queue import KeydQueue, Queue


def started(function, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)), daemon=True)
    thread.start()
    thread.results = results
    return thread


def is_blocked(thread):
    thread.join(0.05)
    return thread.is_alive()


def result(thread):
    thread.join(600)
    assert not thread.is_alive()
    return thread.results[0]


def test_171_items_come_out_in_order():
    queue = Queue()
    for n in range(3):
        queue.put(n)
    assert [queue.get() for _ in range(3)] == [0, 1, 2]
    assert queue.max_size() == 1024


@pytest.mark.parametrize("key", [(), ("a",)])
def test_171_get_waits_for_put(key):
    queue = KeydQueue() if key else Queue()
    getter = started(queue.get, *key)
    assert is_blocked(getter)
    queue.put(*key, "item")
    assert result(getter) == "item"


@pytest.mark.parametrize("ending", ["close", "close_write"])
@pytest.mark.parametrize("key", [(), ("a",)])
def test_171_an_ending_wakes_a_getter_with_none(ending, key):
    queue = KeydQueue() if key else Queue()
    getter = started(queue.get, *key)
    assert is_blocked(getter)
    getattr(queue, ending)()
    assert result(getter) is None


def test_171_put_waits_while_the_queue_is_full():
    queue = Queue(maxsize=1)
    queue.put(1)
    putter = started(queue.put, 2)
    assert is_blocked(putter)
    assert queue.get() == 1
    result(putter)
    assert queue.get() == 2


def test_171_a_full_queue_takes_the_item_of_a_key_that_is_waited_for():
    queue = KeydQueue(maxsize=1)
    queue.put("a", 1)
    assert is_blocked(started(queue.put, "b", 2))
    getter = started(queue.get, "b")
    assert result(getter) == 2
    assert queue.get("a") == 1


def test_a_getter_lets_the_waiting_producer_of_its_key_in():
    queue = KeydQueue(maxsize=1)
    queue.put("a", 1)
    putter = started(queue.put, "b", 2)
    assert is_blocked(putter)
    assert queue.get("b") == 2
    result(putter)


def test_close_drops_late_items_and_wakes_a_producer_but_keeps_what_is_inside():
    queue = Queue(maxsize=1)
    queue.put(1)
    putter = started(queue.put, 2)
    assert is_blocked(putter)
    queue.close()
    result(putter)
    queue.put(3)
    assert [queue.get(), queue.get()] == [1, None]


def test_close_write_still_takes_a_late_item():
    queue = KeydQueue()
    queue.close_write()
    assert queue.get("a") is None
    queue.put("a", 1)
    assert queue.get("a") == 1


def test_an_absent_key_after_close_is_none():
    queue = KeydQueue()
    queue.put("a", 1)
    queue.close()
    assert (queue.get("b"), queue.get("a")) == (None, 1)


def test_no_item_is_lost_or_doubled_between_many_threads():
    queue, taken, lock = Queue(maxsize=3), [], threading.Lock()

    def take():
        while (item := queue.get()) is not None:
            with lock:
                taken.append(item)

    takers = [started(take) for _ in range(3)]
    putters = [started(lambda k=k: [queue.put((k, n)) for n in range(200)]) for k in range(3)]
    for putter in putters:
        result(putter)
    queue.close_write()
    for taker in takers:
        result(taker)
    assert sorted(taken) == [(k, n) for k in range(3) for n in range(200)]


def test_a_queue_of_no_size_is_refused():
    with pytest.raises(ValueError, match="give at least 1"):
        Queue(maxsize=0)


def test_a_late_getter_does_not_spin():
    class Watched(deque):
        looks = 0

        def __bool__(self):
            Watched.looks += 1
            return len(self) > 0

    queue = Queue()
    queue._items = Watched()
    getter = started(queue.get)
    assert is_blocked(getter)
    assert Watched.looks <= 1  # and then it slept
    queue.close()
