"""`torch_xla.debug.profiler`: its traces are torch's, and there is no server to ask for one."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import profile

import ltc
from ltc.compat.torch_xla.xla_only import ignored
from ltc.support.observation.profiler import Trace

_FILE = Path("plugins", "profile", "ltc", "trace.json")  # below the folder, where TensorBoard looks
_running: list[tuple[profile, Path]] = []  # one at most


def start_trace(log_dir: str) -> None:
    """Begin a trace that `stop_trace` writes below the folder."""
    if _running:
        raise RuntimeError("Only one profile may be run at a time. Call stop_trace() first.")
    traced = profile()
    traced.start()
    atexit.register(_end)  # torch's profiler does not outlive Python
    _running.append((traced, Path(log_dir, _FILE)))


def stop_trace() -> None:
    """End the trace, and write it as a file that TensorBoard and chrome://tracing show."""
    if not _running:
        raise RuntimeError("No profile started. Call start_trace(log_dir) first.")
    ltc.sync(wait=True)
    traced, path = _running.pop()
    traced.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    traced.export_chrome_trace(str(path))


def _end() -> None:
    if _running:
        stop_trace()


def start_server(port: int, only_on_master: bool = True) -> None:
    """No server: what it would serve is XLA's own."""
    _without_server()


def trace(service_addr: str, logdir: str, *args: Any, **kwargs: Any) -> None:
    """Nothing: there is no server to ask for a trace."""
    _without_server()


def trace_detached(*args: Any, **kwargs: Any) -> None:
    """Nothing: there is no server to ask for a trace."""
    _without_server()


def _without_server() -> None:
    ignored("profiler_server", "it has none. Use start_trace(folder) and stop_trace()")


def trace_me(scope: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: each call is a named region of torch's profiler, and of the metrics."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with Trace(scope):
                return function(*args, **kwargs)

        return traced

    return decorate
