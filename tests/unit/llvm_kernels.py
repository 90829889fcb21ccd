"""Runs generated kernels on tensors, for this machine or for a lesser one that it contains."""

import ctypes
import functools

import torch

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit.isa import AVX2, AVX512, SSE2, host_isa

HOST = host_isa(llvm_binding.has_feature)
LLVM_NAMES = {
    AVX512: ("skylake-avx512", "+avx512f,+avx512bw,+avx512dq,+avx512vl"),
    AVX2: ("haswell", "+avx2,+fma"),
    SSE2: ("x86-64", "+sse2"),
}
# What this machine can run; baseline instructions are those of x86-64.
ISAS = [HOST] + [isa for isa in (AVX2, SSE2) if HOST.name.startswith("avx") and isa != HOST]

# How far a sum of `count` products of standard normals may be from the exact one.
EPSILON = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def tolerance(dtype: torch.dtype, count: int) -> float:
    return EPSILON[dtype] * 8 * (1 + count**0.5)


@functools.cache
def entry(text: str, isa) -> object:
    """The kernel as a function, of code that uses no instruction outside `isa`."""
    if isa != HOST:
        cpu, features = LLVM_NAMES[isa]
        narrow = f'"target-cpu"="{cpu}" "target-features"="{features}"'
        text = text.replace("attributes #0 = {", f"attributes #0 = {{ {narrow} ")
        text = text.replace('"min-legal-vector-width"="512"', '"min-legal-vector-width"="0"')
    address = llvm_binding.compile_kernels(text, "kernel")["kernel"]
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(address)


def run(kernel, isa, *tensors: torch.Tensor, tasks: int = 3) -> None:
    """One launch, its tasks one after another."""
    words = [*[t.data_ptr() for t in tensors], *kernel.numbers]
    pointers = (ctypes.c_int64 * len(words))(*words)
    for task in range(tasks):
        entry(kernel.text, isa)(pointers, task, tasks)


def run_all(sequence, isa, tasks: int = 3, **buffers: torch.Tensor) -> None:
    """A KernelSequence, its arguments by name; scratch memory begins as NaN."""
    for name, size in sequence.scratch.items():
        buffers[name] = torch.full((size // 8 + 1,), float("nan"), dtype=torch.float64)
    for kernel in sequence.kernels:
        run(kernel, isa, *[buffers[name] for name in kernel.arguments], tasks=tasks)


def guarded(shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor full of 7 to be written, and the memory it lies in the middle of."""
    size = torch.Size(shape).numel()
    memory = torch.full((size + 256,), 7.0, dtype=dtype)
    return memory[128 : 128 + size].view(shape), memory


def is_untouched(memory: torch.Tensor) -> bool:
    """Whether nothing was written around a guarded tensor."""
    return bool((memory[:128] == 7).all() and (memory[-128:] == 7).all())
