"""The ways of running PyTorch that bench.py compares, one process each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from workloads import Way


@dataclass(frozen=True)
class System:
    """A way to run PyTorch.

    Attributes:
        device: The device of its tensors.
        way: The way it runs a workload; `way.mark` ends a step.
        forget: Ends a step that is only to be recorded.
        finish: Returns when everything that was started is over.
        settle: Returns when no program is compiled behind; True if there was one.
        restart: Is called before the last steps that warm up: what ran until then is of no
            interest.
        again: Runs the longest program since then once more, without recording it, or None where a
            system has no such thing.
    """

    device: str
    way: Way = field(default_factory=Way)
    forget: Callable[[], object] = lambda: None
    finish: Callable[[], object] = lambda: None
    settle: Callable[[], bool] = bool
    restart: Callable[[], object] = lambda: None
    again: Callable[[], object] | None = None


def eager(**optimizer_options) -> System:
    return System("cpu", Way(optimizer_options=optimizer_options))


def compiled(optimizer: bool = False) -> System:
    """torch.compile of the model, and of the optimizer's step where that is asked for."""
    way = Way(compile_model=torch.compile)
    if optimizer:
        way = Way(compile_model=torch.compile, compile_optimizer=torch.compile)
    return System("cpu", way)


def torch_lazy() -> System:
    import torch._lazy
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()

    def execute():
        torch._lazy.mark_step(wait=True)

    return System("lazy", Way(mark=execute), forget=execute)


def ltc_system(**variables: str) -> System:
    """`variables` are LTC_* settings."""
    os.environ.update(variables)
    import ltc  # noqa: F401
    import ltc.core.lazy_model as ltm
    from ltc.device.recording.sync import discard
    from ltc.device.recording.tensors import device_of

    device = ltm.lazy_device()
    return System(
        str(device), Way(mark=ltm.mark_step), forget=lambda: discard(device_of(device)),
        finish=ltm.wait_device_ops, settle=compiled_behind,
    )  # fmt: skip


def compiled_behind() -> bool:
    """Block until the programs that were asked for are compiled; return True if there were any."""
    from ltc.runtime.background import compile_behind

    was_compiling = compile_behind.is_compiling()
    compile_behind.wait()
    return was_compiling


def ltc_fused() -> System:
    system = ltc_system()
    return replace(system, way=replace(system.way, optimizer_options={"fused": True}))


def ltc_program() -> System:
    """The longest program of a step alone: what recording and handing over do not cost."""
    system = ltc_system(LTC_CACHE="0", LTC_TIER="native")  # a step of one call is no program else
    launches = Launches()
    return replace(system, restart=launches.restart, again=launches.repeat_longest)


class Launches:
    """Remembers what each compiled program was last given, and how long it took."""

    def __init__(self) -> None:
        from ltc.runtime.transfers import backend

        self._seen: dict[int, tuple] = {}  # of each computation: (seconds, launch, arguments)
        chosen = backend()
        self._compile = chosen.compile
        chosen.compile = self._watched

    def _watched(self, *arguments):
        computation = self._compile(*arguments)
        launch = computation.launch

        def watched(buffers: list, scalars: list) -> list:
            given = list(buffers), list(scalars)
            started = time.perf_counter()
            results = launch(buffers, scalars)
            self._seen[id(computation)] = (time.perf_counter() - started, launch, given)
            return results

        computation.launch = watched
        return computation

    def restart(self) -> None:
        self._seen.clear()

    def repeat_longest(self) -> None:
        _, launch, (buffers, scalars) = max(self._seen.values(), key=lambda seen: seen[0])
        launch(buffers, scalars)


SYSTEMS: dict[str, Callable[[], System]] = {
    "eager": eager,
    "eager foreach": lambda: eager(foreach=True),
    "eager fused": lambda: eager(fused=True),
    "compile": compiled,
    "compile all": lambda: compiled(optimizer=True),
    "torch._lazy": torch_lazy,
    "ltc": ltc_system,
    "ltc fused": ltc_fused,
    "ltc bf16": lambda: ltc_system(LTC_USE_BF16="1"),
    "ltc program": ltc_program,
}
