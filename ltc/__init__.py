"""A PyTorch device that waits: `ltc` tensors record what is asked of them, run by the step."""

from __future__ import annotations

import atexit as _atexit
import contextlib
import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ltc.support.known_system import require_known_system as _require_known_system

_require_known_system()
_collects = gc.isenabled()
gc.disable()  # nothing of this is garbage, and one look at all of torch's objects takes 0.1 s
try:
    from ltc import amp  # noqa: F401  `ltc.amp` and `ltc.core` are there, as `torch.amp` is
    from ltc.core import lazy_model as _lazy_model  # noqa: F401
    from ltc.debug.whereabouts import answer_signal as _answer_signal
    from ltc.device import register as _register  # noqa: F401  it registers the device
    from ltc.device.hooks.names import device_index as _device_index
    from ltc.device.recording.recorder import devices as _all_devices
    from ltc.device.recording.tensors import current_device as _current_device
    from ltc.device.recording.tensors import is_lazy as _is_lazy
    from ltc.device.recording.tensors import set_current_device as _set_current_device
    from ltc.distributed import process_group as _process_group  # noqa: F401  and it what torch.distributed finds
    from ltc.distributed.lazy_multiprocessing import launch
    from ltc.explaining.budget import budget
    from ltc.explaining.history import explain
    from ltc.explaining.no_sync import no_sync
    from ltc.integrations import plug_ins as _plug_ins
    from ltc.profiling.last_lines import begin_lines as _begin_lines
    from ltc.profiling.last_lines import end_lines as _end_lines
    from ltc.profiling.profile import begin_whole_run as _begin_whole_run
    from ltc.profiling.profile import end_whole_run as _end_whole_run
    from ltc.profiling.profile import profile
    from ltc.replay.compiled_step import CompiledStep as _CompiledStep
    from ltc.runtime.physical_dtype import physical as _physical
    from ltc.support.version import VERSION as __version__  # noqa: F401
    from ltc.tracebacks import entrance as _entrance
    from ltc.tracebacks import make_entrances as _make_entrances
    from ltc.utils import steps as _steps
finally:
    if _collects:
        gc.enable()

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

        Raises IndexError where there is no such device, RuntimeError for one of another kind.

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
    """Every ltc device of this process, in the order of their indices.

    >>> ltc.devices()[0]
    device(type='ltc', index=0)
    """
    return [one.torch_device for one in _all_devices()]


def device_count() -> int:
    """How many devices this process has: LTC_NUM_DEVICES, as it was before the first use.

    >>> ltc.device_count() == len(ltc.devices())
    True
    """
    return len(_all_devices())


def sync(wait: bool = False) -> None:
    """End a step on the thread's current device: what is recorded becomes a program and is started.

    wait  return only when it has run

    The same as `ltm.mark_step`. Raises the error of a step that failed since the last mark.

    >>> x = torch.ones(3, device="ltc") + 1
    >>> ltc.sync(wait=True)
    """
    _steps.mark(wait=wait)


def compile(function: Callable | None = None) -> Any:
    """A step function whose calls are replayed, without its Python, once two were alike.

    `@ltc.compile` or `ltc.compile(function)`. A call is a recording of its own: what was pending
    is started before, what it records at its end. Two calls in succession that record the same are
    enough: from then on the program is given the call's tensors, and the function is not run.

    It may use its arguments and what it closes over: modules, optimizers, tensors, numbers. All is
    looked at in each call: shapes, dtypes, `training`, which parameters there are and whether they
    want gradients, hooks, methods, values that its code names, autocast, grad mode. Where something
    is different the call is recorded, and replayed when it comes back. Learning rates, step counts,
    floats that are arguments are handed over. Each LTC_REPLAY_CHECKth call is recorded to compare
    it: a function that does something else raises StepDiffers.

    A replayed call does not see what changes elsewhere: the environment, files, the clock, Python's
    random numbers and an `if` by them, an iterator, what the function imports inside, the insides of
    installed packages. Give such a value as an argument: else calls are replayed as they were until
    one is checked.

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

    Results carry no graph: a backward belongs inside. What prints, reads a value, adds a step
    closure, draws from a generator of its own or keeps what it makes elsewhere than in gradients,
    parameters and its result cannot be replayed: it runs as it is, with one warning that says why
    (and `refusal` of what this returns). Raises TypeError for what is no function.
    """
    if function is None:
        return compile
    if not callable(function):
        raise TypeError(f"ltc.compile takes a function, not a {type(function).__name__}")
    return _CompiledStep(function)


@contextlib.contextmanager
@_entrance
def step():
    """`with ltc.step():` is one step: what was pending before is run first, the rest at the end.

    The end is marked where the block raises, too. Raises the error of a step that failed since the
    last mark.

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
    """The dtype that the tensor has in memory: under LTC_USE_BF16, narrower than `tensor.dtype`.

    >>> ltc.physical_dtype(torch.ones(2, device="ltc"))
    torch.float32
    """
    return _physical(tensor.dtype) if _is_lazy(tensor) else tensor.dtype


def manual_seed(seed: int, device=None) -> None:
    """Seed one ltc device (the thread's current one where None); torch.manual_seed seeds all.

    device  a torch.device, its name or its index

    Raises RuntimeError where `device` is of another kind, IndexError where there is none.

    >>> ltc.manual_seed(7)
    >>> first = torch.rand(3, device="ltc")
    >>> ltc.manual_seed(7)
    >>> torch.equal(first, torch.rand(3, device="ltc"))
    True
    """
    chosen = _current_device().index if device is None else _device_index(device)
    _all_devices()[chosen].random.reset(seed)


_make_entrances(globals(), __all__)
_answer_signal()
_plug_ins.install()
_atexit.register(_end_whole_run)
_begin_whole_run()
_atexit.register(_end_lines)
_begin_lines()
