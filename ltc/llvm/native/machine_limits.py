"""The most that this machine does: bytes copied in a second, and float32 multiply-adds.

Both are measured once, with as many threads as kernels have, and kept in the disk cache.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit.builder import ATTRIBUTES
from ltc.llvm.emit.isa import host_isa
from ltc.llvm.native import runner
from ltc.llvm.native.kernel_run import KernelCall, KernelRun
from ltc.support.disk_cache import disk_cache

COPIED_BYTES = 96 << 20  # of each side: more than caches hold
CHAINS = 10  # operations under way at a time, so that none waits for the one before
STEPS = 200_000
ROUNDS = 20  # of which the fastest counts: others may run on the machine


@dataclass(frozen=True)
class MachineLimits:
    """
    copy_bytes_per_s  bytes read and bytes written together, in a long copy
    fma_per_s         float32 products that are added up
    threads           that did it
    """

    copy_bytes_per_s: float
    fma_per_s: float
    threads: int


_known: dict[int, MachineLimits] = {}


def limits() -> MachineLimits:
    """Of this machine, with the threads that kernels have now; about a second the first time."""
    threads = runner.thread_count()
    if threads not in _known:
        _known[threads] = _kept(threads) or _measured(threads)
    return _known[threads]


def _kept(threads: int) -> MachineLimits | None:
    disk = disk_cache()
    if disk is None:
        return None
    return disk.read_as(_name(threads), lambda data: MachineLimits(*json.loads(data)))


def _measured(threads: int) -> MachineLimits:
    found = MachineLimits(_copy_rate(), _fma_rate(threads), threads)
    disk = disk_cache()
    if disk is not None:
        row = [found.copy_bytes_per_s, found.fma_per_s, found.threads]
        disk.write(_name(threads), json.dumps(row).encode())
    return found


def _name(threads: int) -> str:
    who = f"limits of {platform.node()} {llvm_binding.name_of('')} with {threads} threads"
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
    run = KernelRun([KernelCall(entry, (0, 0, 1, 0), threads)], 2)
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
