"""Keep the latest explanations, each once, and log them to active loggers.

The loggers are "ltc.recompiles", "ltc.cuts", and so on. LTC_LOG names those that print to stderr.
TORCH_LOGS and torch._logging.set_logs print by PyTorch's own loggers, where these have a name for
it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from ltc import config
from ltc.explaining.explanation import (
    COMPILES,
    CUTS,
    FALLBACKS,
    KINDS,
    RECOMPILES,
    TIERS,
    Explanation,
)
from ltc.explaining.notebook import html_table
from ltc.support.observation import metrics
from ltc.support.process.fork_safe_lock import renewed_lock
from ltc.support.torch_private import artifact_logger

MOST = 256  # different explanations that are kept
_kept: OrderedDict[tuple[object, ...], Explanation] = OrderedDict()  # the latest last
_latest: Explanation | None = None  # the last of these
_listeners: list[Callable[[Explanation], None]] = []  # called with each explanation as it happens
_lock = renewed_lock(globals(), "_lock")
_loggers = {kind: logging.getLogger(f"ltc.{kind}") for kind in KINDS}
_TORCH_NAMES = {  # what PyTorch calls the like
    RECOMPILES: "recompiles",
    TIERS: "recompiles_verbose",
    CUTS: "graph_breaks",
    FALLBACKS: "perf_hints",
}
_torch_loggers = {kind: artifact_logger("torch.ltc", name) for kind, name in _TORCH_NAMES.items()}


def note(explanation: Explanation) -> Explanation:
    """Keep an explanation; where the same has happened before, that one, which counts it."""
    known = _kept.get(explanation.identity)
    return _told(explanation) if known is None else again(known)


def again(explanation: Explanation) -> Explanation:
    """Count one more event like an explanation that is kept; return that explanation."""
    explanation.times += 1
    explanation.thread, explanation.moment = threading.current_thread().name, time.time()
    return _told(explanation)


def _told(explanation: Explanation) -> Explanation:
    if explanation is not _latest:  # the same read cuts each step
        _keep(explanation)
    if _listeners:
        for listener in tuple(_listeners):
            listener(explanation)
    show(explanation)
    return explanation


def counts() -> dict[Explanation, int]:
    """Return how often each event that is kept has come, the latest last."""
    with _lock:
        return {explanation: explanation.times for explanation in _kept.values()}


def is_shown(kind: str) -> bool:
    """Return True if explanations of a kind are printed as they happen."""
    torch_logger = _torch_loggers.get(kind)
    is_torchs = torch_logger is not None and torch_logger.isEnabledFor(logging.DEBUG)
    return is_torchs or _loggers[kind].isEnabledFor(logging.INFO)


def show(explanation: Explanation) -> None:
    """Print an explanation where its kind is asked for."""
    logger = _loggers[explanation.kind]
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", explanation)
    torch_logger = _torch_loggers.get(explanation.kind)
    if torch_logger is not None and torch_logger.isEnabledFor(logging.DEBUG):
        torch_logger.debug("%s", explanation)


def _keep(explanation: Explanation) -> None:
    global _latest
    with _lock:
        _kept[explanation.identity] = _latest = explanation
        _kept.move_to_end(explanation.identity)
        if len(_kept) > MOST:
            _kept.popitem(last=False)
            metrics.count("Forgotten.Explanations")


def listen(listener: Callable[[Explanation], None]) -> None:
    """Call `listener` with each explanation from now on, in the thread of the event."""
    with _lock:
        _listeners.append(listener)


def leave(listener: Callable[[Explanation], None]) -> None:
    """Stop calling `listener`."""
    with _lock:
        _listeners.remove(listener)


class Explanations(list[Explanation]):
    """A tuple of explanations that prints their texts, the latest last."""

    def __str__(self) -> str:
        if not self:
            return "Nothing to explain: no recompile, no cut step, no eager fallback."
        return "\n".join(map(str, self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return HTML for a notebook."""
        return html_table(self) if self else f"<p>{self}</p>"


def explain(last: int = 10) -> Explanations:
    """Return the reasons for recompiles, cut steps, side exits and eager fallbacks: the newest last.

    Unexpected errors of ltc's own, after which it fell back, are among them.

    Each prints as at most three lines: the event and your line; the expected and the actual state;
    the cure. Its fields (`kind`, `line`, `reason`, `times`, ...) are for programs. The first program
    of a line of yours is expected, so it is left out. Each process explains its own events.

    Args:
        last: The greatest number of explanations.

    Example:
        >>> x = torch.ones(3, device="ltc") * 2
        >>> if x.sum() > 5:  # a read, before the step is marked
        ...     x = x + 1
        >>> ltm.mark_step()
        >>> [one.kind for one in ltc.explain() if one.reason == "read"][-1:]
        ['cuts']
    """
    with _lock:
        told = [explanation for explanation in _kept.values() if explanation.kind != COMPILES]
    return Explanations(told[max(0, len(told) - last) :] if last > 0 else ())


def forget() -> None:
    """Drop all explanations."""
    global _latest
    with _lock:
        _kept.clear()
        _latest = None


# --- LTC_LOG ------------------------------------------------------------------------------------


class _ToStderr(logging.StreamHandler):
    """Prints where the program has set up no logging of its own, which gets the same records."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def log_what_is_asked_for() -> None:
    """Let the loggers that LTC_LOG names print; called once, when ltc is imported."""
    asked = config.value("LTC_LOG")
    if asked:
        logging.getLogger("ltc").addHandler(_ToStderr())
    for kind in asked:
        _loggers[kind].setLevel(logging.INFO)


log_what_is_asked_for()
