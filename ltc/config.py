"""Every environment variable that ltc reads, in one table: name, how it is read, default, meaning.

A variable is read when its value is needed, so setting `os.environ` in a running program works for
most. LTC_NUM_DEVICES, LTC_USE_BF16 and LTC_DOWNCAST_BF16 are read at the first use of the device;
LTC_LINES and LTC_FORCE_FALLBACK at the first call of each operation; LTC_ISA when the first kernel is
made; LTC_LOG, LTC_ANSWER_SIGNAL and LTC_HOLD_SIGNALS when ltc is imported.
One that is unset, or set to nothing, has its default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ltc.errors import WrongSetting


def boolean(text: str) -> bool:
    """ "1" or "true" is True, "0" or "false" is False, in any case of letters."""
    if text.lower() in ("1", "true"):
        return True
    if text.lower() in ("0", "false"):
        return False
    raise ValueError("expected 1, 0, true or false")


def at_least(minimum: int) -> Callable[[str], int]:
    """A reader of integers not below `minimum`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:  # which says nothing of what is expected
            number = minimum - 1
        if number < minimum:
            raise ValueError(f"expected an integer of at least {minimum}")
        return number

    return read


def one_of(*choices: str) -> Callable[[str], str]:
    """A reader of one word out of `choices`."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text

    return read


def words_of(*choices: str) -> Callable[[str], tuple[str, ...]]:
    """A reader of some words out of `choices`, with commas between them."""

    def read(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(","))
        if not set(words) <= set(choices):
            raise ValueError(f"expected some of {', '.join(choices)}, separated by commas")
        return words

    return read


def fractions(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1 with colons between them: "0.5:0.99"."""
    numbers = tuple(float(part) for part in text.split(":"))
    if not all(0 <= number <= 1 for number in numbers):
        raise ValueError("expected numbers from 0 to 1, separated by colons")
    return numbers


@dataclass(frozen=True)
class Flag:
    """One environment variable.

    Attributes:
        read: Text -> value; raises ValueError where the text is not acceptable.
        older: Another name for it, which counts where `name` is not set.
        in_programs: True if a compiled program depends on it: it is part of the program's name on disk.
    """

    name: str
    read: Callable[[str], Any]
    default: Any
    meaning: str
    older: str = ""
    in_programs: bool = False


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


_PERCENTILES = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99)

FLAGS = (
    Flag("LTC_BACKEND", str, "llvm", "the registered backend that runs graphs", in_programs=True),
    Flag(
        "LTC_TIER",
        one_of("auto", "native", "op_by_op"),
        "auto",
        "auto: a new path runs immediately on PyTorch's kernels, and is compiled when it comes back; "
        "native: compiled before its first run; op_by_op: each call runs immediately",
    ),
    Flag(
        "LTC_NATIVE",
        one_of("0", "auto", "require"),
        "auto",
        "auto: calls run in C++ where the native core is built: by python -m ltc build, or beside a program "
        "that runs for some seconds; 0: in Python; require: an error where it is not built; read when ltc "
        "is imported",
    ),
    Flag("LTC_NATIVE_DIR", str, "", "folder of the native core; default: that of LTC_CACHE_DIR"),
    Flag("LTC_NATIVE_TRIED", str, "", "the library that a self-test of the core loads"),
    Flag("CXX", str, "", "the C++ compiler of the native core; default: g++, clang++ or c++"),
    Flag(
        "LTC_SYMBOLIC",
        boolean,
        True,
        "a path that comes back at other sizes becomes one path of symbols with one program",
    ),
    Flag(
        "LTC_COMPILE_BEHIND",
        boolean,
        True,
        "programs are compiled by another process, while the calls of the path run on PyTorch's "
        "kernels; the native core is built by one as well",
    ),
    Flag(
        "LTC_COPY_PROCESS",
        boolean,
        True,
        "the process that compiles is a fork of this one, if this one is small and none of your threads "
        "runs; 0: always a new process, which imports torch first",
    ),
    Flag(
        "LTC_PROGRESS",
        boolean,
        True,
        "a line on a terminal or in a notebook while a program takes longer than 2 s to compile",
    ),
    Flag(
        "LTC_HINTS",
        boolean,
        True,
        "one line on stderr, once, where a loop runs slower than eager PyTorch, or reads NaN",
    ),
    Flag(
        "LTC_REPLAY_CHECK",
        at_least(1),
        1000,
        "ltc.compile records and compares one of so many calls that it could replay; LTC_CHECK=1: "
        "each",
    ),
    Flag(
        "LTC_NUM_DEVICES",
        at_least(0),
        1,
        "number of devices of this process; 0: as many as the backend finds",
        older="CPU_NUM_DEVICES",
    ),
    Flag(
        "LTC_USE_BF16",
        boolean,
        False,
        "devices keep float and double tensors as bfloat16",
        in_programs=True,
    ),
    Flag(
        "LTC_DOWNCAST_BF16",
        boolean,
        False,
        "devices keep float tensors as bfloat16 and double ones as float",
        in_programs=True,
    ),
    Flag("LTC_SYNC_WAIT", boolean, False, "each mark_step waits until its step has run"),
    Flag("LTC_EMIT_STEPLOG", boolean, False, "each mark_step writes one line to stderr"),
    Flag(
        "LTC_FALLBACK", one_of("count", "warn", "error"), "count", "the effect of an eager fallback"
    ),
    Flag(
        "LTC_FORCE_FALLBACK", str, "", "ops to run eagerly, such as aten::add, separated by commas"
    ),
    Flag(
        "LTC_CHECK_INDEX",
        boolean,
        True,
        "an index outside its dimension raises IndexError; 0: the value that it reads is not defined",
        in_programs=True,
    ),
    # What is recorded and kept.
    Flag("LTC_LINES", boolean, False, "calls from different lines are different paths"),
    Flag(
        "LTC_MAX_PENDING_NODES",
        at_least(1),
        10_000,
        "recorded calls after which a step is cut without mark_step",
        older="TRIM_GRAPH_SIZE",
    ),
    Flag(
        "LTC_MAX_PENDING_BYTES",
        at_least(1),
        _half_of_memory(),
        "bytes of pending results after which a step is cut (half of the machine's memory)",
    ),
    Flag("LTC_MAX_RECORDED", at_least(1), 200_000, "recorded entries kept per device"),
    Flag("LTC_MAX_IN_FLIGHT", at_least(1), 4, "steps that may wait or run in the background"),
    Flag(
        "LTC_CACHE_PROGRAMS",
        at_least(1),
        1024,
        "compiled programs kept; the least recently used go first",
        older="COMPILATION_CACHE_SIZE",
    ),
    Flag("LTC_CACHE", boolean, True, "keep compiled programs on disk, for later processes"),
    Flag("LTC_CACHE_DIR", str, "", "folder of these; default: ltc in the user's folder for caches"),
    Flag("XDG_CACHE_HOME", str, "", "the user's folder for caches; default: ~/.cache"),
    Flag(
        "LTC_CACHE_MB", at_least(1), 1024, "megabytes kept there; the least recently used go first"
    ),
    Flag(
        "LTC_ISA",
        one_of("native", "avx2", "sse4"),
        "native",
        "instructions that kernels may use: this processor's, or any x86-64 processor's with AVX2 or "
        "SSE4.2",
        in_programs=True,
    ),
    Flag(
        "LTC_WINOGRAD",
        boolean,
        True,
        "3x3 convolutions of float32 multiply transformed tiles where that takes fewer cycles; 0: none does",
        in_programs=True,
    ),
    Flag("LTC_MAX_ASYNC_QUEUE", at_least(1), 100, "asynchronous step closures that may wait"),
    # Machinery that gains time: docs/machinery.md says when to turn each off.
    Flag(
        "LTC_THREADS",
        one_of("pool", "openmp", "one"),
        "pool",
        "threads that run a kernel's tasks: ltc's own, OpenMP's, or the caller alone",
    ),
    Flag(
        "LTC_RESERVE_CORE",
        boolean,
        True,
        "kernels leave a processor to the thread that records (up to 4 cores) and to the compiler",
    ),
    Flag(
        "LTC_PREFAULT_MB",
        at_least(0),
        64,
        "megabytes touched for gradients while a model is moved to a device; 0: none",
    ),
    # Looking inside.
    Flag(
        "LTC_CHECK",
        boolean,
        False,
        "verify the graph after each pass, and the memory accesses of each kernel",
        in_programs=True,
    ),
    Flag(
        "LTC_DEBUG",
        boolean,
        False,
        "tracebacks show every frame inside ltc; printing reads no pending tensor; if set before the "
        "start, five lines at the end name the bound of the program, and its page",
    ),
    Flag(
        "LTC_VERIFY",
        boolean,
        False,
        "check every value that a program computes, and raise VerificationError for a wrong one",
    ),
    Flag(
        "LTC_DEBUG_NANS",
        boolean,
        False,
        "raise NotFinite if a program gives NaN or infinities, naming the operation of the first",
    ),
    Flag(
        "LTC_DUMP",
        str,
        "",
        "stages to print when a step is compiled (see ltc.debug.graphs), separated by commas",
    ),
    Flag("LTC_IR_DEBUG", boolean, False, "graphs show the user's line for each node"),
    Flag("LTC_SAVE_TENSORS_FILE", str, "", "file to which the graph of each sync is appended"),
    Flag("LTC_SAVE_TENSORS_FMT", one_of("text", "dot", "backend"), "text", "format of that graph"),
    Flag(
        "LTC_ANSWER_SIGNAL", boolean, True, "SIGUSR1 prints the stack of each thread of the process"
    ),
    Flag(
        "LTC_HOLD_SIGNALS",
        boolean,
        True,
        "signal handlers run after the current call of ltc has ended",
    ),
    Flag(
        "LTC_LOG",
        words_of("compiles", "recompiles", "cuts", "fallbacks", "tiers", "faults"),
        (),
        "kinds of events to explain on stderr: recompiles,cuts,fallbacks,tiers,compiles,faults",
    ),
    Flag(
        "LTC_METRICS_FILE",
        str,
        "",
        "file that gets a report each step, as JSON if its name ends in .jsonl; or STDOUT, STDERR",
    ),
    Flag(
        "LTC_PROFILE", str, "", "file that gets a trace of the whole run, as ltc.profile writes it"
    ),
    Flag("LTC_PROFILE_RUN", str, "", "name of the run whose processes write one such file"),
    Flag("LTC_METRICS_SAMPLES", at_least(1), 1024, "latest samples kept of each metric"),
    Flag("LTC_METRICS_PERCENTILES", fractions, _PERCENTILES, "percentiles in the report"),
    Flag("RATE_TRACKER_SMOOTHING", float, 0.4, "weight of RateTracker's previous rate"),
    Flag("DEBUG", boolean, False, "xu.get_print_fn() prints to stderr"),
    # Who this process is; set by a launcher.
    Flag(
        "XRT_SHARD_WORLD_SIZE",
        at_least(1),
        1,
        "number of processes that train together",
        older="WORLD_SIZE",
    ),
    Flag(
        "XRT_SHARD_ORDINAL",
        at_least(0),
        0,
        "this process's number among all of these",
        older="RANK",
    ),
    Flag(
        "XRT_SHARD_LOCAL_ORDINAL",
        at_least(-1),
        -1,
        "its number on this host; -1: not set",
        older="LOCAL_RANK",
    ),
    Flag("LOCAL_WORLD_SIZE", at_least(0), 0, "number of processes on this host; 0: all of them"),
    Flag("OMP_NUM_THREADS", at_least(0), 0, "threads of each process; 0: its share of the cores"),
    Flag("LTC_RENDEZVOUS", str, "", "private folder where the processes of one host meet"),
    Flag(
        "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB",
        float,
        4.0,
        "megabytes of gradients that are reduced together",
    ),
    Flag(
        "LTC_TRANSPORT",
        one_of("auto", "memory", "hosts"),
        "auto",
        "transport between replicas: memory; hosts: as if each process had its own host",
    ),
    Flag("MASTER_ADDR", str, "127.0.0.1", "host of torchrun's store"),
    Flag("MASTER_PORT", at_least(0), 0, "port of that store; 0: there is none"),
    Flag(
        "GLOO_SOCKET_IFNAME", str, "", "interfaces that other hosts reach this one by, also gloo's"
    ),
    Flag("TORCHELASTIC_USE_AGENT_STORE", boolean, False, "torchrun runs that store"),
    Flag("TORCHELASTIC_RESTART_COUNT", at_least(0), 0, "number of restarts by torchrun"),
    Flag("LTC_PEER_TIMEOUT", float, 300.0, "seconds that a collective waits for the others"),
)

_BY_NAME = {name: flag for flag in FLAGS for name in (flag.name, flag.older) if name}
_TABLE_DEFAULT = object()
_ALIKE = 0.8  # of 1, which a name and itself have: two exchanged letters are alike

# A step asks for a dozen variables, most of which are not set: os.environ raises an error inside for
# each of these, so it is the table behind it that is asked, where there is one.
_environment = getattr(os.environ, "_data", os.environ).get
_ENCODED = {
    name: os.environ.encodekey(name) if hasattr(os.environ, "_data") else name for name in _BY_NAME
}


def _flag(name: str) -> Flag:
    try:
        return _BY_NAME[name]
    except KeyError:
        hint = did_you_mean(name, _BY_NAME)
        raise KeyError(f"{name} is not in the table of ltc/config.py.{hint}") from None


def value(name: str, default: Any = _TABLE_DEFAULT) -> Any:
    """Return the converted value of the variable; else `default` if given, else the table's.

    Raises:
        ValueError: Naming the variable and its text, if the text can not be read.
    """
    flag = _BY_NAME.get(name) or _flag(name)
    found = _environment(_ENCODED[flag.name]) or (flag.older and _environment(_ENCODED[flag.older]))
    if not found:
        return flag.default if default is _TABLE_DEFAULT else default
    return _read(name, flag, os.fsdecode(found))


def _read(name: str, flag: Flag, text: str) -> Any:
    try:
        return flag.read(text)
    except ValueError as error:
        raise WrongSetting(f"{name}={text}: {error}. It sets: {flag.meaning}.") from None


def check_environment() -> None:
    """Raise WrongSetting for the first variable of ltc whose text cannot be read."""
    for name, variable, text in found_in_environment():
        if name.startswith("LTC_"):
            _read(variable, _BY_NAME[name], text)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question after the known name that is nearest to an unknown one; "" if none is near."""
    nearest = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""


_MOST_TEXTS = 64  # of variables that change all the time


def _as_they_are(*values: Any) -> tuple:
    return values


def reader(*names: str, of: Callable[..., Any] = _as_they_are) -> Callable[[], Any]:
    """A function that gives what these variables are set to, as `value` does.

    It reads their texts again only where one of them has changed: steps ask all the time.

    Args:
        of: Gives the answer from their values, where these alone decide it.
    """
    flags = [_flag(name) for name in names]
    asked = [_ENCODED[name] for flag in flags for name in (flag.name, flag.older) if name]
    known: dict[Any, Any] = {}

    def read_anew(texts: Any) -> Any:
        if len(known) >= _MOST_TEXTS:
            known.clear()
        found = known[texts] = of(*map(value, names))
        return found

    def read() -> Any:
        texts = tuple(map(_environment, asked))
        found = known.get(texts)
        return read_anew(texts) if found is None else found

    def read_one() -> Any:
        text = _environment(asked[0])
        found = known.get(text)
        return read_anew(text) if found is None else found

    return read if len(asked) > 1 else read_one


def environment_without_settings() -> dict[str, str]:
    """Return the environment for a process that is to have every setting of ltc at its default."""
    return {name: text for name, text in os.environ.items() if not name.startswith("LTC_")}


def environment_with(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment for a process that is to have these variables beside the present ones."""
    return {**os.environ, **variables}


def found_in_environment() -> list[tuple[str, str, str]]:
    """(flag, variable that sets it, its text) of every flag that is not left at its default."""
    found = []
    for flag in FLAGS:
        names = [name for name in (flag.name, flag.older) if name and os.environ.get(name)]
        found += [(flag.name, name, os.environ[name]) for name in names[:1]]
    return found


def unknown_variables() -> list[tuple[str, str]]:
    """(name, the name that is nearest to it, or "") of variables that look like ltc's and are none."""
    unknown = [name for name in os.environ if name.startswith("LTC_") and name not in _BY_NAME]
    return [
        (name, "".join(difflib.get_close_matches(name, _BY_NAME, n=1))) for name in sorted(unknown)
    ]


def misspelled_variables() -> list[tuple[str, str]]:
    """Return (name, probable meaning) of variables that are nearly ltc's, and not another
    program's.
    """
    return [
        (name, nearest[0])
        for name, _ in unknown_variables()
        if (nearest := difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=_ALIKE))
    ]


def compiled_settings() -> str:
    """The variables that a compiled program may depend on, as one text."""
    return ";".join(f"{flag.name}={value(flag.name)}" for flag in FLAGS if flag.in_programs)


def _as_text(setting: Any) -> str:
    if isinstance(setting, bool):
        return str(int(setting))
    if isinstance(setting, (tuple, list)):
        return ":".join(map(str, setting))
    return str(setting)


_called_after_override: list[Callable[[], object]] = []


def call_after_override(function: Callable[[], object]) -> None:
    """Let it be called whenever `override` has set variables, or set them back."""
    _called_after_override.append(function)


@contextmanager
def override(**settings: Any) -> Iterator[None]:
    """Set variables inside the block, for this process and those it starts; None unsets one.

    The environment belongs to the whole process: other threads see the change too.
    """
    before = {_flag(name).name: os.environ.get(_flag(name).name) for name in settings}
    try:
        for name, setting in settings.items():
            _put(_flag(name).name, None if setting is None else _as_text(setting))
        _tell_of_override()
        yield
    finally:
        for name, text in before.items():
            _put(name, text)
        _tell_of_override()


def check(**settings: Any) -> None:
    """Raise WrongSetting if a variable cannot have its value; None stands for its default."""
    for name, setting in settings.items():
        text = "" if setting is None else _as_text(setting)
        if text:
            _read(name, _flag(name), text)


def change(**settings: Any) -> None:
    """Set variables for good, for this process and those it starts; None unsets one.

    Raises:
        WrongSetting: If a variable cannot have its value; then none is set.
    """
    check(**settings)
    for name, setting in settings.items():
        _put(_flag(name).name, None if setting is None else _as_text(setting))
    _tell_of_override()


def _tell_of_override() -> None:
    for function in _called_after_override:
        function()


def _put(name: str, text: str | None) -> None:
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text
