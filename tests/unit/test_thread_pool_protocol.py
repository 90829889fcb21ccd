"""The pool under every interleaving of two and three threads: nothing is lost or twice.

The models say once more what the native text does, action by action. That they say the same is
tested first; then that they keep their promises; and then that each barrier, wake-up and
read-modify-write is there for a reason: without it they do not.
"""

import functools
from collections.abc import Callable

import pytest

from ltc.llvm.native import system, thread_pool
from tests.models import thread_pool as pool_model
from tests.models.actions import Actions
from tests.models.interleavings import Broken, Machine
from tests.models.native_text import actions_of

pytestmark = pytest.mark.skipif(not system.has_threads(), reason="there is no pool here")

A, B, ONE = ("a", 2), ("b", 2), ("a", 1)  # launches: name, tasks
NOTHING_OLD = ()  # where the number of threads makes old values too many to try


def pool_of(*callers: tuple, members: int = 2, has_recorder: bool = False, weak=None, **how):
    """What makes a machine of the pool out of actions."""

    def made(actions: Actions) -> Machine:
        pool = pool_model.Pool(actions, members, **how)
        return pool_model.machine(callers, members, pool, has_recorder, weak)

    return made


# Each with all old values that a thread may read, or with those of the variables that are named.
POOL = {
    "a caller and a member, and what tasks write": pool_of((A,)),
    "one launch after another": pool_of((A, B), has_results=False),
    "two callers and nobody else": pool_of((A,), (B,), members=1),
    "two callers and a member": pool_of((A,), (B,), has_results=False, weak=("range",)),
    "a caller and two members": pool_of((A,), members=3, has_results=False, weak=NOTHING_OLD),
    "a processor is given back": pool_of(
        (ONE,), has_recorder=True, has_results=False, weak=("away.until",)
    ),
    "a processor is given back as a launch begins": pool_of(
        (A,), has_recorder=True, has_results=False, weak=("lock",)
    ),
}  # fmt: skip


@functools.cache
def explored(make: Callable[[Actions], Machine]) -> tuple[int, frozenset[str]]:
    """How many states there are, and which actions were done."""
    machine = make(Actions())
    return machine.explore(), frozenset(machine.done)


@pytest.mark.parametrize("name", POOL)
def test_tasks_run_once_members_are_woken_and_all_comes_to_an_end(name):
    assert explored(POOL[name])[0] > 100


# --- the models and the text --------------------------------------------------------------------

POOL_VARIABLES = {
    "@pool.lock": "lock", "@pool.entry": "entry", "@pool.members": "members",
    "@pool.done": "done", "@pool.launches": "launches", "@pool.away.until": "away.until",
    "@pool.away.from": "away.from", "%line": "range", "%asleep": "asleep",
}  # fmt: skip
GOES_WITH_ENTRY = {"@pool.arguments": "entry", "@pool.tasks": "entry"}
NOT_NATIVE = ("kernel ", "python ")  # blocks of the models that stand for what calls the text
# After a fork, when there is no other thread; where the system may run a thread, which is advice.
OUTSIDE = ("pool.forget.", "pool.part.")


def native(done: set[str]) -> set[str]:
    return {name for name in done if not name.startswith(NOT_NATIVE) and "choose" not in name}


def pool_text() -> set[str]:
    found = actions_of(thread_pool.text(), POOL_VARIABLES)
    return {name for name in found if not name.startswith(OUTSIDE)}


def done_by(scenarios: dict) -> set[str]:
    return set().union(*(explored(make)[1] for make in scenarios.values()))


def test_the_pools_model_does_what_its_text_does():
    assert native(done_by(POOL)) == pool_text()


def test_what_goes_with_a_launch_is_written_and_read_together():
    text = thread_pool.text()
    of_entry = actions_of(text, {"@pool.entry": "entry"})
    for name, variable in GOES_WITH_ENTRY.items():
        assert actions_of(text, {name: variable}) == of_entry


# --- what each is there for ---------------------------------------------------------------------

# Action -> the scenario that breaks without it: a fence or a wake-up that is left out, a
# read-modify-write that is a load and then a store.
NEEDED = {
    "pool.launch.published fence seq_cst": "a caller and a member, and what tasks write",
    "pool.launch.start cmpxchg lock acquire": "two callers and nobody else",
    "pool.member.leave fence seq_cst": "a processor is given back",
    "pool.stay.away.start fence seq_cst": "a processor is given back",
    "pool.wake.call WAKE asleep": "a caller and a member, and what tasks write",
    "pool.work.run add done acq_rel": "a caller and a member, and what tasks write",
    "pool.work.try cmpxchg range acq_rel": "a caller and a member, and what tasks write",
}
# Likewise for actions that would be ordered as any others.
ORDERED = {
    "pool.launch.publish store range release": "a caller and a member, and what tasks write",
    "pool.launch.wait load done acquire": "a caller and a member, and what tasks write",
}


@pytest.mark.parametrize("name", NEEDED)
def test_without_it_the_protocol_fails(name):
    with pytest.raises(Broken):
        POOL[NEEDED[name]](Actions(without=[name])).explore()


@pytest.mark.parametrize("name", ORDERED)
def test_without_its_order_the_protocol_fails(name):
    with pytest.raises(Broken):
        POOL[ORDERED[name]](Actions(unordered=[name])).explore()


def test_every_barrier_wake_up_and_compare_and_swap_is_among_them():
    text = pool_text()
    barriers = {name for name in text if name.split()[1] in ("fence", "WAKE", "cmpxchg")}
    assert barriers <= set(NEEDED) <= text
    assert set(ORDERED) <= text


def test_a_range_that_does_not_say_of_which_launch_it_is_gives_a_task_to_the_next():
    make = pool_of((A, B), has_results=False, counts_launches=False)
    with pytest.raises(Broken):
        make(Actions()).explore()
