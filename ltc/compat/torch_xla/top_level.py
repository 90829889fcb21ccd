"""`torch_xla` itself: devices, steps, functions that are one step, and calls that are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import ltc
from ltc import config
from ltc.compat.torch_xla.xla_device import XlaDevice, native, shown
from ltc.compat.torch_xla.xla_only import set_custom_compile_options
from ltc.device.hooks import names
from ltc.distributed.lazy_multiprocessing import spawn
from ltc.support.observation import metrics


def device(index: int | None = None) -> XlaDevice:
    """The thread's current device, or device `index`, which becomes the current one."""
    choose: Any = ltc.device  # a package that is called like a function
    return shown(choose(index))


def devices() -> list[XlaDevice]:
    """Every device of this process."""
    return [XlaDevice(index) for index in range(ltc.device_count())]


def device_count() -> int:
    """Return how many devices this process has."""
    return ltc.device_count()


def real_devices() -> list[str]:
    """The names of the hardware behind the devices: ["CPU:0"]."""
    return names.real_devices([str(native(one)) for one in devices()])


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """End a step; `reset_scope` has no meaning here."""
    ltc.sync(wait)


def manual_seed(seed: int, device: Any = None) -> None:
    """Seed a device: the thread's current one where None."""
    ltc.manual_seed(seed, None if device is None else native(device))


def launch(
    fn: Callable[..., Any],
    args: tuple = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> Any:
    """`fn(ordinal, *args)` in a process for each device; in this one where debug_single_process."""
    return spawn(fn, args, 1 if debug_single_process else None, start_method=start_method)


def step() -> CompiledRegion:
    """`with torch_xla.step():` is one step; what was pending before is run first."""
    return CompiledRegion()


def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: dict | None = None,
) -> Any:
    """Return a function of which each call is one step; without `f`, a decorator and context.

    Args:
        full_graph: Raise RuntimeError if a value is read before the end of the function.
        max_different_graphs: Raise RuntimeError once the function has recorded more graphs.
    """
    if custom_compile_options:
        set_custom_compile_options(custom_compile_options)
    region = CompiledRegion(name or "", full_graph, max_different_graphs)
    return region if f is None else region(f)


class CompiledRegion:
    """A region that runs as one step of its own: a `with` block, or each call of a function."""

    def __init__(
        self, name: str = "", full_graph: bool = False, most_graphs: int | None = None
    ) -> None:
        self._name, self._full_graph, self._most_graphs = name, full_graph, most_graphs
        self._graphs = 0  # runs that recorded a new path
        self._counts: list[metrics.counted] = []  # of the blocks that are open

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """The function, each call of which is one step."""
        region = CompiledRegion(
            self._name or getattr(f, "__name__", str(f)), self._full_graph, self._most_graphs
        )

        @functools.wraps(f)
        def as_one_step(*args: Any, **kwargs: Any) -> Any:
            with region:
                return f(*args, **kwargs)

        return as_one_step

    def __enter__(self) -> CompiledRegion:
        sync()
        self._counts.append(metrics.counted().__enter__())
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        counts = self._counts.pop()
        counts.__exit__()
        sync()
        if kind is None:
            self._check(counts)

    def _check(self, counts: metrics.counted) -> None:
        if self._full_graph and counts["EarlySyncLiveTensorsCount"]:
            raise RuntimeError(
                "Unexpected execution happens inside the compiled function, exiting: "
                f"{self._name or 'the block'} read a tensor's value before its end. Return the "
                "tensor and read it after the call, or leave out full_graph=True."
            )
        self._graphs += bool(counts["RecordedEntries"])
        if self._most_graphs is not None and self._graphs > self._most_graphs:
            raise RuntimeError(
                "Maximum number of different graphs allowed per function exceeded: "
                f"{self._most_graphs}. {self._name or 'The block'} has recorded {self._graphs}. Pad "
                "its inputs to fewer shapes, and pass changing Python numbers as tensors; "
                "LTC_DUMP=simplify shows each graph."
            )


_eager = contextlib.ExitStack()  # open while each call runs when it is made


def eager_mode(enable: bool) -> None:
    """Run each call when it is made, in place of a whole step, or stop doing so."""
    ltc.sync()
    _eager.close()
    if enable:
        _eager.enter_context(config.override(LTC_TIER="op_by_op"))


def is_eager_mode() -> bool:
    """Return True if each call runs when it is made."""
    return bool(config.value("LTC_TIER") == "op_by_op")


@contextlib.contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """`eager_mode` inside the block."""
    before = is_eager_mode()
    eager_mode(enable)
    try:
        yield
    finally:
        eager_mode(before)
