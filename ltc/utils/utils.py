"""`xu`: small helpers that training programs use."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from ltc import config
from ltc.support.tree import DataWrapper, for_each_instance, for_each_instance_rewrite

__all__ = [
    "Cleaner",
    "DataWrapper",
    "FnDataGenerator",
    "LazyProperty",
    "SampleGenerator",
    "TimedScope",
    "TmpFolder",
    "as_list",
    "check_env_flag",
    "eprint",
    "flatten_nested_tuple",
    "for_each_instance",
    "for_each_instance_rewrite",
    "get_free_tcp_ports",
    "get_print_fn",
    "getenv_as",
    "list_copy_append",
    "null_print",
    "parallel_work",
    "shape",
    "timed",
]


# --- objects ------------------------------------------------------------------------------------


class Cleaner:
    """Calls `func()` when it is deleted."""

    def __init__(self, func: Callable[[], Any]):
        self.func = func

    def __del__(self):
        self.func()


class LazyProperty:
    """A value that `gen_fn()` makes when it is first asked for."""

    def __init__(self, gen_fn: Callable[[], Any]):
        self._gen_fn: Callable[[], Any] | None = gen_fn

    @property
    def value(self) -> Any:
        if self._gen_fn is not None:
            self._value, self._gen_fn = self._gen_fn(), None
        return self._value


class TmpFolder:
    """A new folder, `name`, that is removed with all in it when this object is deleted."""

    def __init__(self):
        self.name = tempfile.mkdtemp()
        self._cleaner = Cleaner(lambda name=self.name, remove=shutil.rmtree: remove(name, True))


class SampleGenerator:
    """The same `data`, `sample_count` times, anew for every iteration."""

    def __init__(self, data: Any, sample_count: int):
        self._data, self._sample_count = data, sample_count

    def __len__(self) -> int:
        return self._sample_count

    def __iter__(self) -> Iterator[Any]:
        return (self._data for _ in range(self._sample_count))


class FnDataGenerator:
    """`count` pairs (x, func(x)), anew for every iteration.

    Args:
        gen_tensor: Makes x of shape [batch_size, *dims] when called with these as arguments.
        dims: [1] where None.
    """

    def __init__(
        self,
        func: Callable[[Any], Any],
        batch_size: int,
        gen_tensor: Callable[..., Any],
        dims: Sequence[int] | None = None,
        count: int = 1,
    ):
        self._func, self._gen_tensor, self._count = func, gen_tensor, count
        self._shape = (batch_size, *(dims if dims is not None else [1]))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for _ in range(self._count):
            x = self._gen_tensor(*self._shape)
            yield x, self._func(x)


# --- nested data --------------------------------------------------------------------------------


def as_list(t: Any) -> list | tuple:
    """`t` where it is a list or tuple, else [t]."""
    return t if isinstance(t, (list, tuple)) else [t]


def shape(inputs: Any) -> list[int]:
    """The lengths of nested lists, outermost first; [] for anything that is not a list.

    Raises:
        ValueError: If lists of one level differ in length.
    """
    if not isinstance(inputs, (list, tuple)):
        return []
    inner = [shape(x) for x in inputs]
    if any(other != inner[0] for other in inner):
        raise ValueError(f"Lists of one level have the shapes {inner}: a shape needs them equal.")
    return [len(inputs), *(inner[0] if inner else [])]


def flatten_nested_tuple(inputs: Any) -> tuple:
    """All that nested lists and tuples hold, in order."""
    if not isinstance(inputs, (list, tuple)):
        return (inputs,)
    return tuple(leaf for x in inputs for leaf in flatten_nested_tuple(x))


def list_copy_append(ilist: Sequence, item: Any) -> list:
    """A list of all in `ilist`, then `item`."""
    return [*ilist, item]


# --- environment and printing -------------------------------------------------------------------


def getenv_as(name: str, type: Callable[[str], Any], defval: Any = None) -> Any:
    """The environment variable as `type`; `defval` where it is not set.

    A bool is written as a number: "true" raises ValueError.
    """
    text = os.environ.get(name)
    if text is None:
        return defval
    return type(int(text)) if type is bool else type(text)


def check_env_flag(name: str, default: str = "") -> bool:
    """Return True if the environment variable is ON, 1, YES, TRUE or Y, in any case of letters."""
    return os.environ.get(name, default).upper() in ("ON", "1", "YES", "TRUE", "Y")


def null_print(*args: Any, **kwargs: Any) -> None:
    """Print nothing."""


def eprint(*args: Any, **kwargs: Any) -> None:
    """Print to stderr."""
    print(*args, file=sys.stderr, **kwargs)


def get_print_fn(debug: bool | None = None) -> Callable[..., None]:
    """`eprint` where `debug`, else `null_print`; None asks the variable DEBUG."""
    if debug is None:
        debug = config.value("DEBUG")
    return eprint if debug else null_print


class TimedScope:
    """`with TimedScope(msg):` prints how long the block took, and the error that was set."""

    def __init__(self, msg: str = "", printfn: Callable[..., None] | None = eprint):
        self._msg, self._printfn = msg, printfn
        self._error: Any = None

    def set_error(self, error: Any) -> None:
        """Have `error` printed with the time."""
        self._error = error

    def __enter__(self) -> TimedScope:
        self._start = time.perf_counter()
        return self

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        if self._printfn is None:
            return
        error = self._error if self._error is not None else value
        ending = "" if error is None else f", error: {error!r}"
        self._printfn(f"{self._msg}{time.perf_counter() - self._start:.3f}s{ending}")


def timed(fn: Callable[[], Any], msg: str = "", printfn: Callable[..., None] = eprint) -> Any:
    """Return the result of `fn()`, and print how long it took."""
    with TimedScope(msg, printfn):
        return fn()


# --- machine ------------------------------------------------------------------------------------


def get_free_tcp_ports(n: int = 1) -> list[int]:
    """`n` different ports of this host that nothing was bound to a moment ago."""
    with ExitStack() as sockets:  # all open at once, so that no port comes twice
        ports = []
        for _ in range(n):
            probe = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind(("", 0))
            ports.append(probe.getsockname()[1])
        return ports


def parallel_work(num_workers: int, fn: Callable[..., Any], *args: Sequence) -> list:
    """`list(map(fn, *args))`, done by `num_workers` threads."""
    with ThreadPoolExecutor(max_workers=num_workers) as executor:
        return list(executor.map(fn, *args))
