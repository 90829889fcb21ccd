"""One part of scripts/accelerator_check, in a process of its own: prints one line of JSON.

python scripts/bench/accelerator_parts.py machine
python scripts/bench/accelerator_parts.py values gpt
python scripts/bench/accelerator_parts.py times gpt reduce-overhead
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata

import more_workloads
import torch
import workloads
from workloads import Way

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.runtime.transfers import backend

STEPS = 6
DRAWS_ON_THE_DEVICE = ("mnist_cnn", "vit", "adamw_many")  # as the llvm backend does, not as PyTorch
LIMIT, LIMIT_OF_RESNET = 1e-3, 0.3  # in float32, where rounding grows tenfold a step in ResNet
TIMED_SECONDS = 1.0


def workload(name: str, device: str, way: Way) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    found = vars(workloads).get(name) or vars(more_workloads)[name]
    step: Callable[[], torch.Tensor] = found(device, way)
    return step


# --- the machine ---------------------------------------------------------------------------------


def machine() -> dict:
    """The device, its clocks, and the versions of all that takes part."""
    versions = {name: metadata.version(name) for name in ("torch", "jax", "jaxlib", "numpy")}
    devices = [f"{d.kind} {d.name} {d.memory_bytes >> 20} MiB" for d in backend().devices()]
    return {
        "devices": devices, "described": described(), "card": card(),
        "python": platform.python_version(), "versions": versions,
        "processors": os.cpu_count(), "load": os.getloadavg()[0],
    }  # fmt: skip


def described() -> str:
    describe = backend().capabilities.describe
    return "" if describe is None else describe()


def card() -> dict[str, str]:
    """Clocks and memory as nvidia-smi tells them; {} where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    names = "name", "driver_version", "clocks.sm", "clocks.mem", "memory.used", "power.draw"
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    first = done.stdout.splitlines()[0] if done.stdout else ""
    return dict(zip(names, first.split(", ")))


# --- values --------------------------------------------------------------------------------------


def values(name: str) -> dict:
    """Six losses beside those of the CPU, and how far they are from them."""
    expected = losses(name, *(("ltc", "llvm") if name in DRAWS_ON_THE_DEVICE else ("cpu", "llvm")))
    began = time.perf_counter()
    with metrics.counted() as grown:
        found = losses(name, "ltc", "xla")
    worst = max(abs(x - y) / max(abs(y), 1e-6) for x, y in zip(found, expected))
    cut_out = sorted(key for key in grown if key.startswith("CutOut::"))
    limit = LIMIT_OF_RESNET if name == "resnet18" else LIMIT
    return {
        "losses": found, "expected": expected, "error": worst, "ok": worst <= limit,
        "cut_out": cut_out, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def losses(name: str, device: str, chosen: str) -> list[float]:
    mark = ltm.mark_step if device == "ltc" else (lambda: None)
    with config.override(LTC_BACKEND=chosen, LTC_TIER="native"):
        step = workload(name, device, Way(mark=mark))
        return [step().detach().double().item() for _ in range(STEPS)]


# --- times ---------------------------------------------------------------------------------------


def times(name: str, chosen: str) -> dict:
    """The first step, and later ones: pipelined, waited for, and until the host may go on; in ms."""
    if chosen == "ltc":
        device, finish, way = "ltc", ltm.wait_device_ops, Way(mark=ltm.mark_step)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        finish = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        way = way_of_torch(chosen)
    began = time.perf_counter()
    step = workload(name, device, way)
    step().item()
    first = time.perf_counter() - began
    for _ in range(8):
        step()
    finish()
    return {
        "device": device, "first_s": round(first, 3), "pipelined_ms": pipelined(step, finish),
        "synchronised_ms": median_ms(lambda: (step(), finish()), finish),
        "host_ms": median_ms(step, finish), "peak_bytes": peak_bytes(device),
    }  # fmt: skip


def way_of_torch(chosen: str) -> Way:
    options = {} if chosen == "eager" else {"fused": True}
    if chosen in ("eager", "fused"):
        return Way(optimizer_options=options)
    mode = {} if chosen == "compile" else {"mode": chosen}
    return Way(compile_model=lambda model: torch.compile(model, **mode), optimizer_options=options)


def pipelined(step: Callable, finish: Callable) -> float:
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < TIMED_SECONDS:
        step()
        count += 1
    finish()
    return round((time.perf_counter() - began) / count * 1e3, 4)


def median_ms(call: Callable, finish: Callable) -> float:
    """The median time of a call, of which none is under way when the next one begins."""
    found = []
    began = time.perf_counter()
    while time.perf_counter() - began < TIMED_SECONDS / 2 or len(found) < 3:
        finish()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    finish()
    return round(statistics.median(found) * 1e3, 4)


def peak_bytes(device: str) -> int | None:
    """The most memory that was in use; None where the device does not say."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if device == "cpu":
        return None
    import jax

    found = jax.local_devices()[0].memory_stats() or {}
    return found.get("peak_bytes_in_use")


if __name__ == "__main__":
    part = {"machine": machine, "values": values, "times": times}[sys.argv[1]]
    print(json.dumps(part(*sys.argv[2:])))
