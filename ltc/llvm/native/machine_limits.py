"""The most that this machine does: bytes copied in a second, and float32 multiply-adds.

Both are measured with as many threads as kernels have, and kept in the disk cache with the time. They
are measured again once they are old. A measurement beside which others kept the processors busy is not
kept, and says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np
import torch

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit.builder import ATTRIBUTES
from ltc.llvm.emit.isa import host_isa
from ltc.llvm.native import runner
from ltc.llvm.native.kernel_run import EntryCall, KernelRun
from ltc.support.disk_cache import disk_cache

COPIED_BYTES = 96 << 20  # of each side: more than caches hold
CHAINS = 10  # operations under way at a time, so that none waits for the one before
STEPS = 200_000
MAX_AGE_SECONDS = 30 * 24 * 3600  # clocks and memory may have been changed meanwhile
MAX_OTHERS = 0.1  # of all processors: what a desktop does beside
ROUNDS = 20  # of which the fastest counts: others may run on the machine


@dataclass(frozen=True)
class MachineLimits:
    """The measured limits of a machine.

    Attributes:
        copy_bytes_per_s: Bytes read and bytes written together, in a long copy.
        fma_per_s: Float32 products that are added up.
        threads: The threads that reached these.
        measured_at: Seconds since the epoch.
        others_share: The share of the processors that others used meanwhile.
    """

    copy_bytes_per_s: float
    fma_per_s: float
    threads: int
    measured_at: float
    others_share: float

    @property
    def is_quiet(self) -> bool:
        """True if nothing else ran that would have slowed the measurement down."""
        return self.others_share <= MAX_OTHERS

    @property
    def is_old(self) -> bool:
        """True if the machine may be another one by now, or its clock was put back."""
        return not 0 <= time.time() - self.measured_at < MAX_AGE_SECONDS


_known: dict[int, MachineLimits] = {}


def limits() -> MachineLimits:
    """Return this machine's limits with the present threads; about a second if they are measured."""
    threads = runner.thread_count()
    found = _known.get(threads) or _kept(threads)
    if found is None or found.is_old:
        found = _measured(threads)
    _known[threads] = found
    return found


def _kept(threads: int) -> MachineLimits | None:
    disk = disk_cache()
    if disk is None:
        return None
    return disk.read_as(_name(threads), lambda data: MachineLimits(*json.loads(data)))


def _measured(threads: int) -> MachineLimits:
    watch = _Processors()
    copied, multiplied = _copy_rate(), _fma_rate(threads)
    found = MachineLimits(copied, multiplied, threads, time.time(), watch.others_share())
    disk = disk_cache()
    if disk is not None and found.is_quiet:
        disk.write(_name(threads), json.dumps(astuple(found)).encode())
    return found


class _Processors:
    """The use of all processors from here on."""

    def __init__(self) -> None:
        self._begun, self._mine = _ticks(), time.process_time()

    def others_share(self) -> float:
        """Return the share of their time that others used; 0.0 where the system does not tell."""
        (busy, all), (busy_before, all_before) = _ticks(), self._begun
        mine = (time.process_time() - self._mine) * os.sysconf("SC_CLK_TCK")
        passed = all - all_before
        return max(0.0, busy - busy_before - mine) / passed if passed else 0.0


def _ticks() -> tuple[int, int]:
    """Return the clock ticks of all processors in which they computed, and all."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, idle, waiting, *others = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return 0, 0
    busy = user + nice + system + sum(others)
    return busy, busy + idle + waiting


def _name(threads: int) -> str:
    who = f"dated limits of {platform.node()} {llvm_binding.name_of('')} with {threads} threads"
    return hashlib.sha256(who.encode()).hexdigest()


def _fastest(once: Callable[[], object]) -> float:
    """Seconds."""
    once()
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _copy_rate() -> float:
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device="cpu")
    target = torch.zeros_like(source)
    return 2 * COPIED_BYTES / _fastest(lambda: target.copy_(source))


def _fma_rate(threads: int) -> float:
    isa = host_isa(llvm_binding.has_feature)
    lanes = isa.lanes(4)
    text = _fma_text(f"<{lanes} x float>", f"v{lanes}f32", isa.fused)
    entry = llvm_binding.compile_kernels(text, "fma.entry")["fma.entry"]
    sums = np.zeros(lanes * threads, dtype=np.float32)
    frame = np.array([STEPS, sums.ctypes.data, 0, 0], dtype=np.int64)
    run = KernelRun([EntryCall(entry, (0, 0, 1, 0), threads)], 2)
    seconds = _fastest(lambda: run.launch(frame.ctypes.data))
    return threads * STEPS * CHAINS * lanes / seconds


def _fma_text(vector: str, name: str, fused: bool) -> str:
    """A kernel whose tasks do nothing but multiply and add, each for its own vector of sums."""
    rows = range(CHAINS)
    begin = "\n".join(f"  %a{k} = phi {vector} [ %x, %start ], [ %b{k}, %next ]" for k in rows)
    fma = f"  %b{{0}} = call {vector} @llvm.fma.{name}({vector} %a{{0}}, {vector} %x, {vector} %x)"
    apart = f"  %m{{0}} = fmul {vector} %a{{0}}, %x\n  %b{{0}} = fadd {vector} %m{{0}}, %x"
    steps = "\n".join((fma if fused else apart).format(k) for k in rows)
    sums = "\n".join(
        f"  %s{k} = fadd {vector} %{'b0' if k == 1 else f's{k - 1}'}, %b{k}" for k in rows[1:]
    )
    return f"""
declare {vector} @llvm.fma.{name}({vector}, {vector}, {vector})
define void @fma.entry(ptr %arguments, i64 %task, i64 %tasks) #0 {{
start:
  %count = load i64, ptr %arguments
  %p = getelementptr i64, ptr %arguments, i64 1
  %sums = load ptr, ptr %p
  %mine = getelementptr {vector}, ptr %sums, i64 %task
  %x = load {vector}, ptr %mine, align 4
  br label %next
next:
  %i = phi i64 [ 0, %start ], [ %after, %next ]
{begin}
{steps}
  %after = add i64 %i, 1
  %more = icmp slt i64 %after, %count
  br i1 %more, label %next, label %end
end:
{sums}
  store {vector} %s{CHAINS - 1}, ptr %mine, align 4
  ret void
}}
{ATTRIBUTES}"""
