"""Messages and sums in shared memory under every interleaving of two processes, with old values.

As in test_thread_pool_protocol.py: the model does what the text does, what is announced is what is read,
and without the order of a counter, or its wake-up, it is not. Then that AArch64's code has the order.
"""

import functools
import platform

import pytest

from ltc.llvm.compiler.llvm_binding import _binding
from ltc.llvm.emit.builder import ATTRIBUTES, argument_loads
from ltc.llvm.native import shared_counters, system
from ltc.llvm.ops import one_shot_sync
from tests.models import shared_memory
from tests.models.actions import Actions
from tests.models.interleavings import Broken
from tests.models.native_text import actions_of

pytestmark = pytest.mark.skipif(
    not system.has_threads(), reason="there is no futex here, and no one-shot sum"
)

SCENARIOS = {
    "messages": shared_memory.messages(3),
    "a sum in two hops": shared_memory.sums("two_hops", 2),
    "one-shot sums": shared_memory.sums("one_shot", 3),
}
VARIABLES = {"%counter": "counter"}


@functools.cache
def explored(name: str) -> tuple[int, frozenset[str]]:
    """How many states there are, and which actions were done."""
    machine = SCENARIOS[name](Actions())
    return machine.explore(), frozenset(machine.done)


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_announced_is_what_is_read_and_all_comes_to_an_end(name):
    assert explored(name)[0] > 100


WORDS = {
    "FUTEX": 98, "HEAD": 64, "PAUSE_DECLARED": "", "PAUSE": "", "SPINS": 9, "MEMBERS": 4,
    "ARGUMENTS": argument_loads(2, 1),
}  # fmt: skip


def kernel_text() -> str:
    """Of the two kernels of a one-shot sum."""
    return "".join(
        one_shot_sync.futex.filled(text, WORDS)
        for text in (one_shot_sync._PUBLISH, one_shot_sync._WAIT)
    )


def test_the_model_does_what_the_text_does():
    text = actions_of(shared_counters.text() + kernel_text(), VARIABLES)
    done = set().union(*(explored(name)[1] for name in SCENARIOS))
    assert {name for name in done if not name.startswith("python ")} == text


# --- what each is there for ---------------------------------------------------------------------

ORDERED = {
    "counter.store.start store counter release": ("messages", "a sum in two hops", "one-shot sums"),
    "counter.load.start load counter acquire": ("messages", "a sum in two hops"),
    "counter.wait.look load counter acquire": ("messages", "a sum in two hops"),
    "counter.wait.sleep load counter acquire": ("messages", "a sum in two hops"),
    "kernel.entry store counter release": ("one-shot sums",),
    "kernel.look load counter acquire": ("one-shot sums",),
}
WAKE_UPS = {
    "counter.store.start WAKE_SHARED counter": ("messages", "a sum in two hops", "one-shot sums"),
    "kernel.entry WAKE_SHARED counter": ("one-shot sums",),
}


def pairs(needed: dict) -> list[tuple[str, str]]:
    return [(action, name) for action, names in needed.items() for name in names]


@pytest.mark.parametrize("action, name", pairs(ORDERED))
def test_without_its_order_something_else_is_read(action, name):
    with pytest.raises(Broken, match="was announced"):
        SCENARIOS[name](Actions(unordered=[action])).explore()


@pytest.mark.parametrize("action, name", pairs(WAKE_UPS))
def test_without_its_wake_up_somebody_sleeps_for_ever(action, name):
    with pytest.raises(Broken, match="no way leads to the end"):
        SCENARIOS[name](Actions(without=[action])).explore()


def test_every_access_of_a_counter_is_among_them():
    text = actions_of(shared_counters.text() + kernel_text(), VARIABLES)
    assert {name for name in text if "WAIT_SHARED" not in name} == {*ORDERED, *WAKE_UPS}


# --- AArch64 ------------------------------------------------------------------------------------


def aarch64(text: str) -> str:
    """The instructions that a text becomes there."""
    llvm = _binding()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="cortex-a76", opt=2, reloc="pic")
    with llvm.parse_assembly(text) as module:
        module.triple, module.data_layout = machine.triple, str(machine.target_data)
        module.verify()
        return machine.emit_assembly(module)


def function(assembly: str, name: str) -> str:
    return assembly.split(f"\n{name}:")[1].split(".Lfunc_end", maxsplit=1)[0]


def is_ordered(code: str) -> tuple[bool, bool]:
    """Whether it has a load that acquires, and a store that releases."""
    return "ldar" in code or "ldapr" in code, "stlr" in code


def test_counters_are_released_and_acquired_on_aarch64(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    text = shared_counters.text()
    assembly = aarch64(text)
    assert is_ordered(function(assembly, "counter.load")) == (True, False)
    assert is_ordered(function(assembly, "counter.store")) == (False, True)
    assert is_ordered(function(assembly, "counter.wait")) == (True, False)
    plain = text.replace(" release,", " monotonic,").replace(" acquire,", " monotonic,")
    assert is_ordered(aarch64(plain)) == (False, False)


def test_one_shot_sums_are_released_and_acquired_on_aarch64():
    publish, wait = [
        aarch64(one_shot_sync.futex.filled(text, WORDS) + ATTRIBUTES)
        for text in (one_shot_sync._PUBLISH, one_shot_sync._WAIT)
    ]
    assert is_ordered(publish) == (False, True)
    assert is_ordered(wait) == (True, False)
