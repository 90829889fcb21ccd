"""The waits of a thread for another, as text for LLVM: the system's futex, a pause, the clock."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping

from ltc.llvm.native.named_blocks import NamedBlocks
from ltc.llvm.native.system import FUTEX

# What the system call is asked for: to wait, to wait until a time of the monotonic clock, to wake;
# and the same of a word that several processes share, where a wait ends after a time.
CALLS = {"WAIT_UNTIL": 9 + 128, "WAIT": 128, "WAKE": 129, "WAIT_SHARED": 0, "WAKE_SHARED": 1}
_PAUSE = {
    "x86_64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "AMD64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}

# @now(): nanoseconds, as time.monotonic_ns() counts them.
CLOCK = """
declare i32 @clock_gettime(i32, ptr)
define internal i64 @now() #0 {
  %clock = alloca [2 x i64], align 8
  %error = call i32 @clock_gettime(i32 1, ptr %clock)
  %seconds = load i64, ptr %clock, align 8
  %part = getelementptr i64, ptr %clock, i64 1
  %more = load i64, ptr %part, align 8
  %scaled = mul i64 %seconds, 1000000000
  %now = add i64 %scaled, %more
  ret i64 %now
}
"""


def pause_text() -> tuple[str, str]:
    """Return the declaration and the call of the pause in a loop that waits for another processor."""
    return _PAUSE.get(platform.machine(), ("", ""))


DECLARED = "declare i64 @syscall(i64, ...)\n"
ALL = 2147483647  # threads that may be woken at once
ANY = 4294967295  # of the kinds of sleepers that the system can tell apart


def wait(f: NamedBlocks, word: str, expected: str) -> None:
    """Sleep until woken, unless the word is already another; may end earlier.

    Args:
        expected: With its type.
    """
    _system_call(f, word, "WAIT", expected)


def wake(f: NamedBlocks, word: str, threads: int) -> None:
    """Up to so many of those that sleep at the word."""
    _system_call(f, word, "WAKE", f"i64 {threads}")


def wait_until(f: NamedBlocks, word: str, expected: str, time: str) -> None:
    """`wait`, until a time at most: the address of its seconds and nanoseconds, of @now()'s clock."""
    _system_call(f, word, "WAIT_UNTIL", expected, time, mask=ANY)


def wait_shared(f: NamedBlocks, word: str, expected: str, nap: str) -> None:
    """`wait` where others are of any process: at most for `nap`, its seconds and nanoseconds."""
    _system_call(f, word, "WAIT_SHARED", expected, nap)


def wake_shared(f: NamedBlocks, word: str, threads: int) -> None:
    """`wake` of those of any process."""
    _system_call(f, word, "WAKE_SHARED", f"i64 {threads}")


def _system_call(
    f: NamedBlocks, word: str, request: str, value: str, time: str = "null", mask: int = 0
) -> None:
    number = FUTEX[platform.machine()]
    call = f"ptr {word}, i64 {CALLS[request]}, {value}, ptr {time}, ptr null, i64 {mask}"
    f.let(f"answer.{request.lower()}", f"call i64 (i64, ...) @syscall(i64 {number}, {call})")


def filled(text: str, words: Mapping[str, object]) -> str:
    """`text` with whole words in capitals replaced."""
    return re.sub(r"\b[A-Z][A-Z_]*\b", lambda word: str(words.get(word[0], word[0])), text)
