"""A function and its arguments on their way to another process."""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import importlib.util
import io
import logging
import multiprocessing.process
import os
import pickle
import reprlib
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch.multiprocessing.reductions

_log = logging.getLogger("ltc")


class PickledCall:
    """`fn` and `args` for one process or several.

    A forked process has them as they are. To others they are pickled: memory of CPU tensors is
    shared, or copied where the system has none to share; what the other process can not import, such
    as a function of a notebook's cell, goes by value if cloudpickle is installed. What fails to
    unpickle does so in `open`.
    """

    def __init__(self, fn: Callable, args: tuple):
        self._content: Any = (fn, args)

    def open(self) -> tuple[Callable, tuple]:
        """The function and its arguments."""
        if isinstance(self._content, bytes):
            return pickle.loads(self._content)
        return self._content

    def __reduce__(self):
        # Here, and not before: shared memory can be handed over only while a process is started.
        return _unpickled, (_pickled(*self._content),)


def _unpickled(content: bytes) -> PickledCall:
    call = PickledCall.__new__(PickledCall)
    call._content = content
    return call


_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)  # what a pickler raises


def _pickled(fn: Callable, args: tuple) -> bytes:
    reducers: dict = cast(Any, ForkingPickler)._extra_reducers
    try:
        return _pickled_with(reducers, fn, args)
    except RuntimeError as error:
        if "shared memory" not in str(error):
            raise
        _log.warning("CPU tensors are copied to the ranks in place of shared memory: %s", error)
        return _pickled_with(_without_sharing(reducers), fn, args)


def _without_sharing(reducers: dict) -> dict:
    """Return the reducers that PyTorch has not added: tensors are then pickled as to a file."""
    return {
        kind: reduce
        for kind, reduce in reducers.items()
        if reduce.__module__ != torch.multiprocessing.reductions.__name__
    }


def _pickled_with(reducers: dict, fn: Callable, args: tuple) -> bytes:
    if not _main_can_be_imported():
        return _by_value(reducers, fn, args, None)
    try:
        return _by_name(reducers, fn, args)
    except _UNPICKLABLE as error:
        return _by_value(reducers, fn, args, error)


def _main_can_be_imported() -> bool:
    """Return True if another process can import the running program: no notebook, no python -c, no
    pipe.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None):
        return True
    file = getattr(main, "__file__", None) or ""  # "<stdin>" of what Python reads from a pipe
    begun_in = cast(Any, multiprocessing.process).ORIGINAL_DIR or ""  # where the other looks
    return bool(file) and os.path.exists(os.path.join(begun_in, file))


@contextlib.contextmanager
def importable_main() -> Iterator[None]:
    """A block in which `__main__` names no file that is not there: a new process would look for it."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or _main_can_be_imported():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def _by_name(reducers: dict, fn: Callable, args: tuple) -> bytes:
    return _written(pickle.Pickler, ChainMap(reducers, copyreg.dispatch_table), fn, args)


def _by_value(reducers: dict, fn: Callable, args: tuple, error: Exception | None) -> bytes:
    if importlib.util.find_spec("cloudpickle") is None:
        if error is None and getattr(fn, "__module__", None) != "__main__":
            try:
                return _by_name(reducers, fn, args)
            except _UNPICKLABLE as failed:
                error = failed
        _refuse_arguments(pickle.Pickler, ChainMap(reducers, copyreg.dispatch_table), args)
        raise pickle.PicklingError(
            f"{fn!r} cannot be sent to other processes: they cannot import a function that was "
            f"defined in a notebook, a prompt or another function. Install cloudpickle (pip "
            f"install 'ltc[notebook]'), move the function to a module, or pass "
            f"start_method='fork'."
        ) from error
    cloudpickle: Any = importlib.import_module("cloudpickle")
    table = ChainMap(reducers, cloudpickle.Pickler.dispatch_table)
    try:
        return _written(cloudpickle.Pickler, table, fn, args)
    except _UNPICKLABLE:
        _refuse_arguments(cloudpickle.Pickler, table, args)
        raise


def _refuse_arguments(kind: Any, table: ChainMap, args: tuple) -> None:
    """Raise PicklingError for the first argument that such a pickler does not take."""
    for position, argument in enumerate(args):
        try:
            _written(kind, table, None, (argument,))
        except _UNPICKLABLE as error:
            raise pickle.PicklingError(
                f"args[{position}] of spawn is {reprlib.repr(argument)}, of type "
                f"{type(argument).__qualname__}, which cannot be pickled for other processes: "
                f"{error}. Create it in the function, or pass start_method='fork'."
            ) from None


def _written(kind: Any, table: ChainMap, fn: Callable | None, args: tuple) -> bytes:
    """Return the bytes that a pickler of this kind writes with that table of reducers."""

    class Pickler(kind):
        # Of the class: cloudpickle's is one too, and would go before an object's.
        dispatch_table = table

    content = io.BytesIO()
    Pickler(content).dump((fn, args))
    return content.getvalue()
