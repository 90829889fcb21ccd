"""`ltc.profile`: what a block does, as a file to look at."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, ClassVar

from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ltc import config
from ltc.errors import BackendMissing, Unsupported
from ltc.explaining import history
from ltc.explaining.explanation import Explanation
from ltc.profiling import report, trace_file
from ltc.profiling.holders import names_of_buffers
from ltc.profiling.trace import TraceWriter
from ltc.runtime.account import all_accounts
from ltc.runtime.executor import all_executors
from ltc.runtime.transfers import capabilities
from ltc.support.module_names import classes_of_modules
from ltc.support.observation import metrics, spans

DEFAULT_PATH = "ltc_profile.json"
SHORT_COLLECTION = 100_000  # nanoseconds of Python's collector that are not worth a span


class profile(contextlib.ContextDecorator):
    """`with ltc.profile("out.json"):` writes a trace of the block; as a decorator, of each call.

    Processes that train together write one file: each adds what it has done. Blocks may be inside
    one another, and one may be entered again: the file is written anew. Where the block raises it
    is written all the same. Until the block ends nothing is written, and a step takes a few per
    cent longer; where calls run one by one, longer than that.

    Attributes:
        path: The file, for ui.perfetto.dev and chrome://tracing: lanes of all threads; steps,
            launches, every kernel with its calls, your line, the module's path, bytes,
            multiply-adds and its share of what the machine does at most; compilations, cuts and
            reads with the reason; memory. None where only a page is wanted; where neither is,
            ltc_profile.json.
        html: The file of a page that shows it; True: beside the trace.
        trace: After the block, the content of the file as json.load gives it: see
            help("ltc.profiling").

    Raises:
        FileNotFoundError: If the folder of a file is missing, before the block begins.

    Example:
        >>> import os, tempfile
        >>> with ltc.profile(os.path.join(tempfile.mkdtemp(), "out.json")) as profiled:
        ...     x = torch.ones(3, device="ltc") * 2
        ...     ltm.mark_step()
        >>> [step["number"] for step in profiled.trace["ltc"]["steps"]]
        [0]
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        html: str | os.PathLike[str] | bool | None = None,
    ) -> None:
        if path is None and not html:
            path = DEFAULT_PATH
        self.path = path
        self.html = html
        self.trace: dict[str, Any] | None = None
        # With where they write; one in another, where it was entered again.
        self._begun: list[tuple[_Session, tuple[str, ...]]] = []

    def __new__(cls, path: Any = None, **options: Any) -> Any:
        """`@ltc.profile` without brackets is given the function."""
        if callable(path):
            return cls(**options)(path)
        return super().__new__(cls)

    def _recreate_cm(self) -> profile:
        return type(self)(self.path, html=self.html)

    def __enter__(self) -> profile:
        targets = tuple(_target(one) for one in (self.path, html_path(self.path, self.html)))
        self._begun.append((_Session(), targets))
        return self

    def __exit__(self, *error: object) -> None:
        session, (path, page) = self._begun.pop()
        if session.end():
            self.trace = session.trace()
            if path:
                self.trace = trace_file.write_joined(self.trace, path, run_name())
            if page:
                report.write(self.trace, page)


def _target(path: str | os.PathLike[str] | None) -> str:
    """Return the absolute path, wherever the block changes folder; "" without a path."""
    if not path:
        return ""
    target = os.path.abspath(path)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):  # told now, not when the block has run for hours
        raise FileNotFoundError(
            f"ltc.profile is to write {os.fspath(path)} when its block ends, but there is no folder "
            f"{folder}. Create it first."
        )
    if os.path.isdir(target):
        raise IsADirectoryError(
            f"ltc.profile is to write {os.fspath(path)} when its block ends, but that is a folder. "
            f"Name a file in it."
        )
    return target


def html_path(
    path: str | os.PathLike[str] | None, html: str | os.PathLike[str] | bool | None
) -> str:
    """Return the path of the page that `html` asks for; "" if it asks for none."""
    if not html:
        return ""
    return f"{os.path.splitext(path or DEFAULT_PATH)[0]}.html" if html is True else os.fspath(html)


def run_name() -> str:
    """Return a name common to all processes that write one file, and to none of another run."""
    started_by = config.value("LTC_PROFILE_RUN") or config.value("LTC_RENDEZVOUS")
    if started_by:
        return str(started_by)
    if config.value("XRT_SHARD_WORLD_SIZE") == 1:
        return uuid.uuid4().hex
    where = [config.value("MASTER_ADDR"), config.value("MASTER_PORT")]
    is_one_host = config.value("LOCAL_WORLD_SIZE") in (0, config.value("XRT_SHARD_WORLD_SIZE"))
    return ":".join(map(str, [*where, os.getppid() if is_one_host else ""]))


# --- the time between two moments ------------------------------------------------------------------


class _Session:
    """One block; those that are open at a time share the timeline."""

    _open: ClassVar[list[_Session]] = []
    _lock: ClassVar[threading.RLock]
    _watch: ClassVar[_Watch]

    def __init__(self) -> None:
        self._process = os.getpid()
        _wait_for_launches()
        with _Session._lock:
            if not _Session._open:
                _Session._watch = _Watch()
            _Session._open.append(self)
        self._timeline = _Session._watch.timeline
        self._counters = metrics.totals()["counters"]
        self._begin, self._end = spans.now(), 0
        self._seen = _Session._watch

    def end(self) -> bool:
        """End the profile; return False if there is nothing to write: in the child of a fork."""
        if os.getpid() != self._process:
            return False
        _wait_for_launches()
        self._end = spans.now()
        with _Session._lock:
            _Session._open.remove(self)
            if not _Session._open:
                self._seen.end()
        return True

    def trace(self) -> dict[str, Any]:
        """Return the trace of the time in between."""
        grown = metrics.growth({"counters": self._counters, "metrics": {}})["counters"]
        writer = TraceWriter(
            self._timeline, self._begin, self._end, _limits_of_machine(), self._seen.explanations,
            self._seen.names(), grown, self._seen.modules,
        )  # fmt: skip
        return writer.trace()


_Session._lock = threading.RLock()


def _limits_of_machine() -> dict[str, float] | None:
    try:
        limits = capabilities().limits
        return None if limits is None else limits()
    except (BackendMissing, Unsupported):  # nothing compiles here
        return None


def _forget() -> None:
    """Close the profiles of the parent in the child of a fork."""
    _Session._lock = threading.RLock()
    if _Session._open:
        _Session._open.clear()
        _Session._watch.end()


os.register_at_fork(after_in_child=_forget)


def _wait_for_launches() -> None:
    """Wait for the launches under way; errors stay with them."""
    for executor in all_executors():
        executor.wait()


class _Watch:
    """A timeline that is told of everything, regions and Python's collector as well."""

    def __init__(self) -> None:
        self.timeline = spans.Timeline(all_accounts, self._name_buffers)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._names: dict[int, tuple[str, Any]] = {}
        self.modules: dict[str, str] = {}  # the class of each, by its path
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self.explanations: list[tuple[int, int, Explanation]] = []
        self._enter, self._exit = record_function.__enter__, record_function.__exit__
        self._collecting = 0
        _put_around_regions(self._region(self._enter), self._end_of_region(self._exit))
        history.listen(self._explained)
        gc.callbacks.append(self._collected)
        spans.watch(self.timeline)

    def end(self) -> None:
        spans.watch(None)
        self._hook.remove()
        gc.callbacks.remove(self._collected)
        history.leave(self._explained)
        _put_around_regions(self._enter, self._exit)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)

    def _name_buffers(self) -> None:
        """Name the buffers while their holders live: most models are gone when the block ends."""
        self._names |= names_of_buffers(self._optimizers)
        self.modules |= classes_of_modules()

    def names(self) -> dict[int, tuple[str, Any]]:
        """By the identity of a buffer: what it holds, and its type."""
        self._name_buffers()
        return self._names

    def _explained(self, explanation: Explanation) -> None:
        if len(self.explanations) < spans.MOST_EVENTS:
            self.timeline.name_thread(get_ident())
            self.explanations.append((spans.now(), get_ident(), explanation))

    def _collected(self, phase: str, information: dict[str, Any]) -> None:
        if phase == "start":
            self._collecting = spans.now()
        elif self._collecting and spans.now() - self._collecting > SHORT_COLLECTION:
            args = {"generation": information["generation"], "collected": information["collected"]}
            self.timeline.add("gc", "garbage collection", self._collecting, spans.now(), args)

    def _region(self, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(enter)
        def entered(region: Any) -> Any:
            region.began_at = spans.now()
            return enter(region)

        return entered

    def _end_of_region(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(leave)
        def left(region: Any, *error: Any) -> Any:
            made = leave(region, *error)
            began = getattr(region, "began_at", None)
            if began is not None:
                args = {"of": region.args} if region.args else {}
                self.timeline.add("user", region.name, began, spans.now(), args)
            return made

        return left


def _put_around_regions(enter: Callable[[Any], Any], leave: Callable[..., Any]) -> None:
    regions: Any = record_function  # a class of torch's, which says nothing of what it does
    regions.__enter__, regions.__exit__ = enter, leave


# --- LTC_PROFILE ----------------------------------------------------------------------------------

_whole: list[contextlib.ExitStack] = []  # of this process from beginning to end
_of_parent: list[contextlib.ExitStack] = []  # of the one that forked this one


def begin_whole_run() -> None:
    """Profile this process from now on into the file that LTC_PROFILE names, written at its end."""
    path = config.value("LTC_PROFILE")
    if path and not _whole:
        run = config.value("LTC_PROFILE_RUN")
        if not run and config.value("XRT_SHARD_WORLD_SIZE") == 1:
            run = uuid.uuid4().hex  # for those that it starts
        stack = contextlib.ExitStack()
        stack.enter_context(config.override(LTC_PROFILE_RUN=run or None))
        stack.enter_context(profile(os.path.abspath(path)))
        _whole.append(stack)


def end_whole_run() -> None:
    """Write it; nothing where it was written already."""
    if _whole:
        _whole.pop().close()


@contextlib.contextmanager
def profile_of_processes(
    path: str | os.PathLike[str], html: str | os.PathLike[str] | bool | None = None
) -> Iterator[profile]:
    """`profile`, with whatever other processes do that this one starts."""
    path = os.path.abspath(path)
    started_by = config.value("LTC_PROFILE_RUN") or uuid.uuid4().hex
    if config.value("XRT_SHARD_WORLD_SIZE") > 1:  # a launcher has started each of them so
        started_by = run_name()
    with (
        config.override(LTC_PROFILE=path, LTC_PROFILE_RUN=started_by),
        profile(path, html=html) as one,
    ):
        yield one


@contextlib.contextmanager
def whole_run() -> Iterator[None]:
    """Profile a process that ends without Python's end, if LTC_PROFILE names a file."""
    begin_whole_run()
    try:
        yield
    finally:
        end_whole_run()


def _leave_to_parent() -> None:
    """The parent writes it. Held: closed, it would unset the name of the run, which is the child's too."""
    _of_parent.extend(_whole)
    _whole.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
