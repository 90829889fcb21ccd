"""One model, one thread and one device each: training with threads instead of processes."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ltc.device.hooks.names import supported_devices
from ltc.device.recording import sync
from ltc.device.recording.tensors import device_of, set_current_device
from ltc.distributed import world
from ltc.distributed.parallel_loader import ParallelLoader
from ltc.distributed.transport import session
from ltc.support.process.thread_frames import thread_frames
from ltc.tracebacks import entrance
from ltc.training_loop.loader_options import LoaderOptions

__all__ = ["Context", "DataParallel", "ThreadResult"]

STOP_SECONDS = 2.0  # what a thread that should stop has to reach its next batch

_log = logging.getLogger(__name__)


class Context:
    """The state of one device between the calls of a DataParallel: an optimizer, a schedule.

    Example:
        >>> from ltc.distributed.data_parallel import Context
        >>> context = Context(ltc.device())
        >>> context.getattr_or("steps", lambda: [])
        []
        >>> context.steps.append(1)
        >>> context.getattr_or("steps", lambda: [])
        [1]
    """

    def __init__(self, device: torch.device):
        self.device = device

    def getattr_or(self, name: str, defval: Any) -> Any:
        """The attribute; where there is none, or None, it becomes `defval`, called if callable."""
        value = getattr(self, name, None)
        if value is None:
            value = defval() if callable(defval) else defval
            setattr(self, name, value)
        return value


class ThreadResult:
    """The `result` of one device's loop function; None before it has returned.

    Example:
        >>> from ltc.distributed.data_parallel import ThreadResult
        >>> print(ThreadResult().result)
        None
    """

    def __init__(self) -> None:
        self.result: Any = None


class DataParallel:
    """Run a loop function on several devices at once, each with a model and batches of its own.

    Gradients are averaged by `ltm.optimizer_step` in the loop function, not by this class. Calling
    the object trains: see `__call__`.

    Args:
        network: A module, or a class or function that makes one; every device gets a copy, so all
            begin with the same weights.
        device_ids: `ltc` devices; None means all of this process; [] means no threads: the loop
            runs in the caller, on the device where the module is.
        enumerate_batches: The loader of the loop function yields (index, batch); False: the batch.
        kwargs: Keyword arguments of ParallelLoader.

    Raises:
        ValueError: If a device is named twice.
        RuntimeError: If `device_ids` is [] and the module is on several devices.

    Example:
        >>> from ltc.distributed.data_parallel import DataParallel
        >>> def count(model, loader, device, context):
        ...     return str(device), sum(len(batch) for index, batch in loader)
        >>> parallel = DataParallel(torch.nn.Linear(4, 2), device_ids=["ltc:0"])
        >>> parallel(count, [torch.ones(8, 4), torch.ones(8, 4)])
        [('ltc:0', 16)]
    """

    def __init__(
        self,
        network: nn.Module | Callable[[], nn.Module],
        device_ids: Sequence | None = None,
        *,
        enumerate_batches: bool = True,
        **kwargs: Any,
    ):
        if device_ids is None:
            device_ids = supported_devices() or []
        LoaderOptions(**kwargs)  # a wrong one is an error of this line
        module = network if isinstance(network, nn.Module) else network()
        self._devices = _distinct([device_of(device) for device in device_ids])
        self._enumerate, self._kwargs = enumerate_batches, kwargs
        if self._devices:
            places = [device.torch_device for device in self._devices]
            self._models = [copy.deepcopy(module).to(place) for place in places]
        else:
            places, self._models = [_device_of_module(module)], [module]
        self._contexts = [Context(place) for place in places]

    @property
    def devices(self) -> list[str]:
        """The names of the devices, in order."""
        return [str(device) for device in self._devices]

    @property
    def models(self) -> list[nn.Module]:
        """The model of each device, in order."""
        return list(self._models)

    @entrance
    def __call__(
        self,
        loop_fn: Callable,
        loader: Iterable,
        batchdim: int = 0,
        fixed_batch_size: bool = False,
        **kwargs: Any,
    ) -> list:
        """Return the results of `loop_fn(model, loader, device, context, **kwargs)`, in device
        order.

        The first exception stops every device and is raised here, with a note that names its own;
        so is that of a step which a loop began and did not wait for.

        Args:
            batchdim, fixed_batch_size: See ParallelLoader.
        """
        if not self._devices:
            batches = _Enumerated(loader) if self._enumerate else loader
            (context,), (model,) = self._contexts, self._models
            return [loop_fn(model, batches, context.device, context, **kwargs)]
        sync.wait_device_ops(self._devices)
        parallel = ParallelLoader(
            loader,
            self._devices_as_torch(),
            batchdim,
            fixed_batch_size=fixed_batch_size,
            **self._kwargs,
        )
        try:
            return _Threads(self._devices, parallel).run(self._calls(loop_fn, parallel, kwargs))
        finally:
            parallel.close()

    def _devices_as_torch(self) -> list[torch.device]:
        return [device.torch_device for device in self._devices]

    def _calls(self, loop_fn, parallel: ParallelLoader, kwargs: dict) -> list[Callable[[], Any]]:
        def call(model, context):
            batches = parallel.per_device_loader(context.device)
            if self._enumerate:
                batches = _Enumerated(batches)
            return loop_fn(model, batches, context.device, context, **kwargs)

        pairs = zip(self._models, self._contexts)
        return [functools.partial(call, *pair) for pair in pairs]


def _distinct(devices: list) -> list:
    """Return the devices; raise ValueError if one is named twice: its threads would wait for each
    other.
    """
    for device in devices:
        if devices.count(device) > 1:
            raise ValueError(
                f"device_ids names {device} twice: each device has one thread and one model. Name "
                f"{len(devices)} different devices; LTC_NUM_DEVICES sets their number."
            )
    return devices


class _Enumerated:
    """A loader's batches with their numbers, from 0 in each epoch."""

    def __init__(self, batches: Any):
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return enumerate(self._batches)


def _device_of_module(module: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise RuntimeError(
            f"Model uses more than one device: {', '.join(sorted(map(str, devices)))}. Without "
            f"device_ids the loop runs on the model's device, so there must be only one."
        )
    return devices.pop() if devices else torch.device("cpu")


class _Stopped(BaseException):
    """Ends a thread because another one has failed; no `except Exception` of a loop catches it."""


class _Threads:
    """One thread per device, from their start to the end of the last."""

    def __init__(self, devices: list, parallel: ParallelLoader):
        self._devices, self._parallel = devices, parallel
        self._results = [ThreadResult() for _ in devices]
        self._ended: queue.SimpleQueue = queue.SimpleQueue()  # (position, error or None)

    def run(self, calls: list[Callable[[], Any]]) -> list:
        """Return the result of each call, whose steps are over; raise the first exception of any."""
        session.renew_threads([device.index for device in self._devices])
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(position, call),
                daemon=True,
                name=f"DataParallel {self._devices[position]}",
            )
            for position, call in enumerate(calls)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for _ in self._threads:
                position, error = self._ended.get()
                if error is not None:
                    self._raise(error, position)
        except BaseException:  # Ctrl-C in the caller too
            self._stop()
            raise
        return [result.result for result in self._results]

    def _work(self, position: int, call: Callable[[], Any]) -> None:
        device = self._devices[position]
        set_current_device(device)
        world.set_replication(device.torch_device, [d.torch_device for d in self._devices])
        try:
            self._results[position].result = call()
            sync.start_collectives()  # others may wait for what nobody reads here
            sync.wait_device_ops([device])  # what fails is of this call, not of the next
            session.say_returned()
        except BaseException as error:  # the caller of DataParallel gets it
            self._ended.put((position, error))
        else:
            self._ended.put((position, None))
        finally:
            world.set_replication(device.torch_device, [])

    def _raise(self, error: BaseException, position: int) -> None:
        error.add_note(f"Exception in model function for device={self._devices[position]}")
        raise error

    def _stop(self) -> None:
        """End what still runs: at its next batch, or, where it asks for none, wherever it is."""
        self._parallel.abort(_Stopped())
        session.abort_threads(_Stopped())
        self._join()
        for thread in self._alive():
            _raise_in(thread)
        self._join()
        frames = thread_frames()
        for thread in self._alive():
            stack = "".join(traceback.format_stack(frames.get(thread.ident or 0)))
            _log.error("The thread %s could not be stopped. Its stack:\n%s", thread.name, stack)
        if not self._alive():
            self._forget_failures()

    def _alive(self) -> list[threading.Thread]:
        return [thread for thread in self._threads if thread.is_alive()]

    def _join(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _forget_failures(self) -> None:
        """Drop errors that the raised one caused on other devices, so that they do not turn up
        later.
        """
        for device in self._devices:
            with contextlib.suppress(Exception):
                sync.wait_device_ops([device])


def _raise_in(thread: threading.Thread) -> None:
    """Raise _Stopped in a thread, as soon as it runs Python code again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped)
    )
