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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


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
            raise ValueError(f"expected some of {', '.join(choices)}, with commas between them")
        return words

    return read


def fractions(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1 with colons between them: "0.5:0.99"."""
    numbers = tuple(float(part) for part in text.split(":"))
    if not all(0 <= number <= 1 for number in numbers):
        raise ValueError("expected numbers from 0 to 1, with colons between them")
    return numbers


@dataclass(frozen=True)
class Flag:
    """One environment variable.

    read   text -> value; raises ValueError where the text is not acceptable
    older  another name for it, which counts where `name` is not set
    """

    name: str
    read: Callable[[str], Any]
    default: Any
    meaning: str
    older: str = ""


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


_PERCENTILES = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99)

FLAGS = (
    Flag("LTC_BACKEND", str, "llvm", "the registered backend that runs graphs"),
    Flag(
        "LTC_TIER",
        one_of("auto", "native", "op_by_op"),
        "auto",
        "auto: what is new runs at once on PyTorch's kernels, and is compiled when it comes back; "
        "native: compiled before its first run; op_by_op: each call runs when it is made",
    ),
    Flag(
        "LTC_SYMBOLIC",
        boolean,
        True,
        "what comes back at other sizes becomes one path and one program of symbols",
    ),
    Flag(
        "LTC_COMPILE_BEHIND",
        boolean,
        True,
        "large programs, and those of sizes that change, are compiled by another process, while they "
        "run on PyTorch's kernels",
    ),
    Flag(
        "LTC_COPY_PROCESS",
        boolean,
        True,
        "the process that compiles is a copy of this one, by fork, where this one is small and no thread "
        "of yours is at work; 0: always a new one, which imports torch first",
    ),
    Flag(
        "LTC_PROGRESS",
        boolean,
        True,
        "a line on a terminal or in a notebook while a program takes longer than 2 s to compile",
    ),
    Flag(
        "LTC_REPLAY_CHECK",
        at_least(1),
        1000,
        "of so many calls that ltc.compile could replay, one is recorded and compared; LTC_CHECK=1 "
        "compares each",
    ),
    Flag("LTC_NUM_DEVICES", at_least(1), 1, "devices of this process", older="CPU_NUM_DEVICES"),
    Flag("LTC_USE_BF16", boolean, False, "devices keep float and double tensors as bfloat16"),
    Flag(
        "LTC_DOWNCAST_BF16",
        boolean,
        False,
        "devices keep float tensors as bfloat16 and double ones as float",
    ),
    Flag("LTC_SYNC_WAIT", boolean, False, "every mark_step waits until its step has run"),
    Flag("LTC_EMIT_STEPLOG", boolean, False, "every mark_step writes one line to stderr"),
    Flag("LTC_FALLBACK", one_of("count", "warn", "error"), "count", "what an op run eagerly does"),
    Flag("LTC_FORCE_FALLBACK", str, "", "ops to run eagerly, as aten::add, with commas between"),
    Flag(
        "LTC_CHECK_INDEX",
        boolean,
        True,
        "an index outside its dimension raises IndexError; 0: what it reads is not defined",
    ),
    # What is recorded and kept.
    Flag("LTC_LINES", boolean, False, "calls from different lines are different recordings"),
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
    Flag("LTC_MAX_IN_FLIGHT", at_least(1), 4, "steps that may wait or run behind the caller"),
    Flag(
        "LTC_CACHE_PROGRAMS",
        at_least(1),
        1024,
        "compiled programs kept; the least recently used go first",
        older="COMPILATION_CACHE_SIZE",
    ),
    Flag("LTC_CACHE", boolean, True, "keep compiled programs on disk, for later processes"),
    Flag("LTC_CACHE_DIR", str, "", "where; default: ltc in the user's folder for caches"),
    Flag("XDG_CACHE_HOME", str, "", "the user's folder for caches; default: ~/.cache"),
    Flag("LTC_CACHE_MB", at_least(1), 1024, "megabytes kept there; the longest unused go first"),
    Flag(
        "LTC_AUTOTUNE",
        boolean,
        False,
        "time several blockings of each matrix product at first, and keep the quickest",
    ),
    Flag(
        "LTC_ISA",
        one_of("native", "avx2", "sse4"),
        "native",
        "instructions that kernels may use: this processor's, or those of any x86-64 with AVX2 or "
        "SSE4.2",
    ),
    Flag("LTC_MAX_ASYNC_QUEUE", at_least(1), 100, "asynchronous step closures that may wait"),
    # Machinery that gains time: docs/machinery.md says when to turn each off.
    Flag(
        "LTC_THREADS",
        one_of("pool", "openmp", "one"),
        "pool",
        "who runs a kernel's tasks: ltc's own threads, OpenMP's, or the caller alone",
    ),
    Flag(
        "LTC_RESERVE_CORE",
        boolean,
        True,
        "kernels leave a processor to who records beside them (up to 4 cores) or compiles behind",
    ),
    Flag("LTC_QUEUE", boolean, True, "programs follow one another without Python"),
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
        "verify the graph after every pass, and what each kernel does to memory",
    ),
    Flag(
        "LTC_DEBUG",
        boolean,
        False,
        "tracebacks show every frame inside ltc; printing reads nothing that is pending; set before "
        "the start, five lines at the end say what bounded the program, and where its page is",
    ),
    Flag(
        "LTC_VERIFY",
        boolean,
        False,
        "judge every value that a program computes, and raise VerificationError for a wrong one",
    ),
    Flag(
        "LTC_DEBUG_NANS",
        boolean,
        False,
        "raise NotFinite where a program gives NaN or infinities, naming what makes the first",
    ),
    Flag(
        "LTC_DUMP",
        str,
        "",
        "stages to print when a step is compiled (see ltc.debug.graphs), with commas between",
    ),
    Flag("LTC_IR_DEBUG", boolean, False, "graphs show the user's line at each node"),
    Flag("LTC_SAVE_TENSORS_FILE", str, "", "file that gets the graph of every sync, appended"),
    Flag("LTC_SAVE_TENSORS_FMT", one_of("text", "dot", "backend"), "text", "form of that graph"),
    Flag("LTC_ANSWER_SIGNAL", boolean, True, "SIGUSR1 prints where each thread of the process is"),
    Flag(
        "LTC_HOLD_SIGNALS", boolean, True, "handlers of signals are called behind a call of ltc's"
    ),
    Flag(
        "LTC_LOG",
        words_of("compiles", "recompiles", "cuts", "fallbacks", "tiers"),
        (),
        "what is explained on stderr as it happens: recompiles,cuts,fallbacks,tiers,compiles",
    ),
    Flag(
        "LTC_METRICS_FILE",
        str,
        "",
        "file that gets a report each step, in JSON where it ends in .jsonl; STDOUT and STDERR work",
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
        "processes that train together",
        older="WORLD_SIZE",
    ),
    Flag("XRT_SHARD_ORDINAL", at_least(0), 0, "this process's number among all", older="RANK"),
    Flag(
        "XRT_SHARD_LOCAL_ORDINAL",
        at_least(-1),
        -1,
        "its number on this host; -1: not set",
        older="LOCAL_RANK",
    ),
    Flag("LOCAL_WORLD_SIZE", at_least(0), 0, "processes on this host; 0: all of them"),
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
        one_of("auto", "memory", "hosts", "ring", "backend"),
        "auto",
        "how replicas exchange: memory, or hosts: each process as if alone on its host; between "
        "hosts ring or backend, untimed",
    ),
    Flag("MASTER_ADDR", str, "127.0.0.1", "where torchrun's store is"),
    Flag("MASTER_PORT", at_least(0), 0, "its port; 0: there is none"),
    Flag("TORCHELASTIC_USE_AGENT_STORE", boolean, False, "whether torchrun runs that store"),
    Flag("TORCHELASTIC_RESTART_COUNT", at_least(0), 0, "how often torchrun began anew"),
    Flag("LTC_PEER_TIMEOUT", float, 300.0, "seconds that a collective waits for the others"),
)

# What a compiled program does not depend on; every other LTC_ variable is part of its name on disk.
_OUTSIDE_PROGRAMS = frozenset(
    {
        "LTC_TIER",
        "LTC_SYMBOLIC",
        "LTC_COMPILE_BEHIND",
        "LTC_COPY_PROCESS",
        "LTC_PROGRESS",
        "LTC_REPLAY_CHECK",
        "LTC_NUM_DEVICES",
        "LTC_SYNC_WAIT",
        "LTC_EMIT_STEPLOG",
        "LTC_FALLBACK",
        "LTC_FORCE_FALLBACK",
        "LTC_LINES",
        "LTC_MAX_PENDING_NODES",
        "LTC_MAX_PENDING_BYTES",
        "LTC_MAX_RECORDED",
        "LTC_MAX_IN_FLIGHT",
        "LTC_CACHE_PROGRAMS",
        "LTC_CACHE",
        "LTC_CACHE_DIR",
        "LTC_CACHE_MB",
        "LTC_MAX_ASYNC_QUEUE",
        "LTC_THREADS",
        "LTC_RESERVE_CORE",
        "LTC_QUEUE",
        "LTC_PREFAULT_MB",
        "LTC_DEBUG",
        "LTC_VERIFY",
        "LTC_DEBUG_NANS",
        "LTC_DUMP",
        "LTC_IR_DEBUG",
        "LTC_SAVE_TENSORS_FILE",
        "LTC_SAVE_TENSORS_FMT",
        "LTC_ANSWER_SIGNAL",
        "LTC_HOLD_SIGNALS",
        "LTC_LOG",
        "LTC_METRICS_FILE",
        "LTC_PROFILE",
        "LTC_PROFILE_RUN",
        "LTC_METRICS_SAMPLES",
        "LTC_METRICS_PERCENTILES",
        "LTC_RENDEZVOUS",
        "LTC_TRANSPORT",
        "LTC_PEER_TIMEOUT",
    }
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
        nearest = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise KeyError(f"{name} is not in the table of ltc/config.py.{hint}") from None


def value(name: str, default: Any = _TABLE_DEFAULT) -> Any:
    """What the variable is set to, converted; else `default` where given, else the table's.

    Raises ValueError, naming the variable and its text, where the text can not be read.
    """
    flag = _BY_NAME.get(name) or _flag(name)
    found = _environment(_ENCODED[flag.name]) or (flag.older and _environment(_ENCODED[flag.older]))
    if not found:
        return flag.default if default is _TABLE_DEFAULT else default
    text = os.fsdecode(found)
    try:
        return flag.read(text)
    except ValueError as error:
        raise ValueError(f"{name}={text}: {error}. It sets: {flag.meaning}.") from None


_MOST_TEXTS = 64  # of variables that change all the time


def reader(*names: str) -> Callable[[], tuple]:
    """A function that gives what these variables are set to, as `value` does.

    It reads their texts again only where one of them has changed: steps ask all the time.
    """
    flags = [_flag(name) for name in names]
    asked = [_ENCODED[name] for flag in flags for name in (flag.name, flag.older) if name]
    known: dict[Any, tuple] = {}

    def read_anew(texts: Any) -> tuple:
        if len(known) >= _MOST_TEXTS:
            known.clear()
        found = known[texts] = tuple(map(value, names))
        return found

    def read() -> tuple:
        texts = tuple(map(_environment, asked))
        return known.get(texts) or read_anew(texts)

    def read_one() -> tuple:
        text = _environment(asked[0])
        return known.get(text) or read_anew(text)

    return read if len(asked) > 1 else read_one


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
    """(name, what is probably meant) of variables that are nearly ltc's, and not another program's."""
    return [
        (name, nearest[0])
        for name, _ in unknown_variables()
        if (nearest := difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=_ALIKE))
    ]


def compiled_settings() -> str:
    """The variables that a compiled program may depend on, as one text."""
    return ";".join(
        f"{flag.name}={value(flag.name)}"
        for flag in FLAGS
        if flag.name.startswith("LTC_") and flag.name not in _OUTSIDE_PROGRAMS
    )


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


def _tell_of_override() -> None:
    for function in _called_after_override:
        function()


def _put(name: str, text: str | None) -> None:
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text
