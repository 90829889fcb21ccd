"""A lazy PyTorch device: `ltc` tensors record their operations, and each step runs as one program."""

from __future__ import annotations

import atexit as _atexit
import contextlib
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ltc.support.known_system import require_known_system as _require_known_system

_require_known_system()

from ltc.support.lazy_module import LazyModule as _LazyModule  # noqa: E402  the system is known
from ltc.support.lazy_module import lazy_names as _lazy_names  # noqa: E402
from ltc.support.lazy_module import uncollected as _uncollected  # noqa: E402

with _uncollected():
    from ltc import config as _config
    from ltc.debug.whereabouts import answer_signal as _answer_signal
    from ltc.device import register as _register  # noqa: F401  it registers the device
    from ltc.device.hooks.names import device_index as _device_index
    from ltc.device.recording.recorder import devices as _all_devices
    from ltc.device.recording.tensors import current_device as _current_device
    from ltc.device.recording.tensors import is_lazy as _is_lazy
    from ltc.device.recording.tensors import set_current_device as _set_current_device
    from ltc.distributed import registration as _registration
    from ltc.integrations import plug_ins as _plug_ins
    from ltc.runtime.physical_dtype import physical as _physical
    from ltc.support.version import VERSION as __version__  # noqa: F401
    from ltc.tracebacks import entrance as _entrance
    from ltc.tracebacks import make_entrances as _make_entrances
    from ltc.training_loop import steps as _steps

if TYPE_CHECKING:  # what these names are; a program imports those that it uses
    from ltc.distributed.lazy_multiprocessing import launch
    from ltc.explaining.budget import budget
    from ltc.explaining.history import explain
    from ltc.explaining.no_sync import no_sync
    from ltc.profiling.profile import profile
else:
    __getattr__ = _lazy_names(
        globals(),
        {
            "budget": "ltc.explaining.budget",
            "explain": "ltc.explaining.history",
            "launch": "ltc.distributed.lazy_multiprocessing",
            "no_sync": "ltc.explaining.no_sync",
            "profile": "ltc.profiling.profile",
        },
    )

_compiled_step = _LazyModule("ltc.replay.compiled_step")
_last_lines = _LazyModule("ltc.profiling.last_lines")
_profile = _LazyModule("ltc.profiling.profile")

__all__ = [
    "budget",
    "compile",
    "device",
    "device_count",
    "devices",
    "explain",
    "launch",
    "manual_seed",
    "no_sync",
    "physical_dtype",
    "profile",
    "step",
    "sync",
]


class _CallableModule(types.ModuleType):
    """`ltc.device` is a package of this project and the name users expect for a function."""

    def __call__(self, index: int | str | torch.device | None = None) -> torch.device:
        """The thread's current device, or the one of an index or name, which becomes the current one.

        Args:
            index: A number, a name or a device; None: the current one.

        Returns:
            The device.

        Raises:
            IndexError: If there is no such device.
            RuntimeError: For one of another kind.

        Example:
            >>> ltc.device(0)
            device(type='ltc', index=0)
        """
        if index is not None:
            chosen, count = _device_index(index), len(_all_devices())
            if not 0 <= chosen < count:
                raise IndexError(f"ltc:{chosen}: this process has {count} ltc devices")
            _set_current_device(_all_devices()[chosen])
        return _current_device().torch_device


device = sys.modules["ltc.device"]
device.__class__ = _CallableModule


def devices() -> list[torch.device]:
    """Return every ltc device of this process, in the order of their indices.

    Example:
        >>> ltc.devices()[0]
        device(type='ltc', index=0)
    """
    return [one.torch_device for one in _all_devices()]


def device_count() -> int:
    """Return the number of devices of this process: LTC_NUM_DEVICES, as it was before the first
    use.

    Example:
        >>> ltc.device_count() == len(ltc.devices())
        True
    """
    return len(_all_devices())


def sync(wait: bool = False) -> None:
    """End a step on the thread's current device: its recorded calls are run as a program.

    The same as `ltm.mark_step`. Raises the error of a step that failed since the last mark.

    Args:
        wait: Return only when it has run.

    Example:
        >>> x = torch.ones(3, device="ltc") + 1
        >>> ltc.sync(wait=True)
    """
    _steps.mark(wait=wait)


def compile(function: Callable | None = None) -> Any:
    """Return a step function whose calls are replayed, without its Python, once two were alike.

    `@ltc.compile` or `ltc.compile(function)`. A call is a recording of its own: calls that were
    pending are started before it, its own at its end. Two calls in succession that record the same
    are enough: from then on the program is given the call's tensors, and the function is not run.

    The contract: every tensor that the function reaches is an input, with its value at the call:
    arguments, closures, globals that its code loads, attributes and items of these. Learning rates,
    step counts and floats that are arguments are handed over. All else is constant. Most constants
    are compared in each call: shapes, dtypes, views, `training`, attributes and hooks of modules,
    globals, closures, items of containers, attributes that the code names, modes of torch. Where one
    is different the call is recorded, and replayed when it comes back.

    Some constants are not compared: the environment, files, the clock, Python's random numbers, an
    iterator, context variables, weak references, objects of installed packages. Give such a value as
    an argument. Each LTC_REPLAY_CHECKth call is recorded and compared; a function that does something
    else raises StepDiffers.

    Results carry no graph: a backward belongs inside. A function that prints, reads a value, adds a
    step closure, draws from a generator of its own, or keeps tensors elsewhere than in gradients,
    parameters and its result cannot be replayed: it runs as it is, with one warning.

    Args:
        function: a function, a method or a module; None to get a decorator.

    Returns:
        An object that is called like the function. Its `refusal` tells why no call is replayed.

    Raises:
        TypeError: `function` cannot be called.

    Example:
        Side effects of the function's Python happen when it is recorded, and only then:

        >>> import itertools
        >>> from ltc import config
        >>> calls = itertools.count()
        >>> @ltc.compile
        ... def double(x):
        ...     next(calls)
        ...     return x * 2
        >>> with config.override(LTC_CHECK=0):  # LTC_CHECK=1 records every call, to compare it
        ...     [double(torch.full((2,), n, device="ltc")).tolist()[0] for n in (1.0, 2.0, 3.0)]
        [2.0, 4.0, 6.0]
        >>> next(calls)
        2
    """
    if function is None:
        return compile
    if not callable(function):
        raise TypeError(f"ltc.compile takes a function, not a {type(function).__name__}")
    return _compiled_step.CompiledStep(function)


@contextlib.contextmanager
@_entrance
def step():
    """`with ltc.step():` is one step: earlier pending work is run first, the block's at its end.

    The end is marked where the block raises, too. Raises the error of a step that failed since the
    last mark.

    Returns:
        A context manager; it gives the block nothing.

    Example:
        >>> with ltc.step():
        ...     x = torch.ones(2, device="ltc") * 3
        >>> x.tolist()
        [3.0, 3.0]
    """
    sync()
    try:
        yield
    finally:
        sync()


def physical_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a tensor's memory: under LTC_USE_BF16, narrower than `tensor.dtype`.

    Args:
        tensor: A lazy tensor.

    Example:
        >>> ltc.physical_dtype(torch.ones(2, device="ltc"))
        torch.float32
    """
    return _physical(tensor.dtype) if _is_lazy(tensor) else tensor.dtype


def manual_seed(seed: int, device=None) -> None:
    """Seed one ltc device (the thread's current one where None); torch.manual_seed seeds all.

    Args:
        device: A torch.device, its name or its index.

    Raises:
        RuntimeError: If `device` is of another kind.
        IndexError: If there is none.

    Example:
        >>> ltc.manual_seed(7)
        >>> first = torch.rand(3, device="ltc")
        >>> ltc.manual_seed(7)
        >>> torch.equal(first, torch.rand(3, device="ltc"))
        True
    """
    chosen = _current_device().index if device is None else _device_index(device)
    _all_devices()[chosen].random.reset(seed)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_make_entrances(globals(), __all__)
_registration.install()
_answer_signal()
_plug_ins.install()
if _config.value("LTC_PROFILE"):
    _atexit.register(_profile.end_whole_run)
    _profile.begin_whole_run()
if _config.value("LTC_DEBUG"):
    _atexit.register(_last_lines.end_lines)
    _last_lines.begin_lines()
