"""Marks that change the settings of a test: `native`, `also_native`, `devices`, `noted_at_once`.

Without them a test runs as a user's program does: LTC_TIER=auto, and one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.device.policy import Policy
from ltc.device.recording import recorder

NATIVE = (
    "native(reason): the test runs with LTC_TIER=native, which compiles a program before its first "
    "run; the reason says why no other tier will do"
)
ALSO_NATIVE = (
    "also_native: the test runs twice, as a user's program and with LTC_TIER=native, for its first "
    "step is compiled there alone"
)
DEVICES = "devices(count): the process has so many ltc devices while the test runs; else it has one"
NOTED_AT_ONCE = (
    "noted_at_once(reason): new paths are noted, as without the native core, which sums a path up first "
    "and notes it once its sum has come back; the reason says why the test counts these steps"
)
RUN, NATIVELY = "run_as", "native"  # the parameter of a test that runs twice
_spare: list[recorder.Device] = []  # devices that only some tests have


@contextmanager
def settings_of(item: pytest.Item) -> Iterator[None]:
    """Set what the marks of the test ask for.

    Raises:
        ValueError: a `native` without a reason.
    """
    native, several = item.get_closest_marker("native"), item.get_closest_marker("devices")
    is_second = getattr(item, "callspec", None) and item.callspec.params.get(RUN) == NATIVELY
    with ExitStack() as settings:
        if several is not None:
            settings.enter_context(devices(*several.args))
        if native is not None and not native.args:
            raise ValueError(f"{item.nodeid}: its mark `native` gives no reason.")
        if native is not None or is_second:
            settings.enter_context(config.override(LTC_TIER="native"))
        yield


def small_steps_are_followed(item: pytest.Item, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the native core a small step is worth no program; here it is, to pass through every state.

    Raises:
        ValueError: a `noted_at_once` without a reason.
    """
    monkeypatch.setattr(Policy, "calls_are_quick", False)
    mark = item.get_closest_marker("noted_at_once")
    if mark is not None:
        if not mark.args:
            raise ValueError(f"{item.nodeid}: its mark `noted_at_once` gives no reason.")
        monkeypatch.setattr(recorder, "Policy", lambda sketches: Policy())


# For a program that a test runs: the same.
NOTES_AT_ONCE = """
from ltc.device.policy import Policy
from ltc.device.recording import recorder
recorder.Policy = lambda sketches: Policy()
recorder.device_at(0).recorder()._plant()
"""


def run_twice(metafunc: pytest.Metafunc) -> None:
    """Give a test with the mark `also_native` a second run; a compared test has several already."""
    marked = metafunc.definition.get_closest_marker
    if marked("also_native") and not marked("native") and not marked("compared"):
        metafunc.parametrize(RUN, ["user", NATIVELY], indirect=True)


@contextmanager
def devices(count: int) -> Iterator[None]:
    """Give the process `count` devices inside the block, and start processes with as many."""
    known = recorder.devices()
    before = len(known)
    while before + len(_spare) < count:
        _spare.append(recorder.Device(before + len(_spare)))
    known.extend(_spare[: count - before])
    try:
        with config.override(LTC_NUM_DEVICES=count):
            yield
    finally:
        for device in known[before:]:
            with suppress(Exception):  # an error that the test expected, and did not wait for
                ltm.mark_step(device.torch_device, wait=True)
        ltm.lazy_device(0)
        del known[before:]
