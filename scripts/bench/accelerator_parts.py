"""One part of scripts/accelerator_check, in a process of its own: prints lines of JSON.

python scripts/bench/accelerator_parts.py machine
python scripts/bench/accelerator_parts.py values gpt
python scripts/bench/accelerator_parts.py first gpt_bf16
python scripts/bench/accelerator_parts.py times gpt_bf16
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata

from accelerator_times import Device, allow_tf32, loss_of, tell, times, workload
from workloads import Way

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.native.core import CORE
from ltc.runtime.transfers import backend

STEPS = 6
DRAWS_ON_THE_DEVICE = ("mnist_cnn",)  # as the llvm backend does, not as PyTorch
LIMIT, LIMIT_OF_RESNET = 1e-3, 0.3  # in float32, where rounding grows tenfold a step in ResNet


# --- the machine ---------------------------------------------------------------------------------


def machine() -> None:
    """Tell the device, its clocks, and the versions of all that takes part."""
    versions = {name: metadata.version(name) for name in ("torch", "jax", "jaxlib", "numpy")}
    devices = [f"{d.kind} {d.name} {d.memory_bytes >> 20} MiB" for d in backend().devices()]
    tell(
        devices=devices, described=described(), card=card(), python=platform.python_version(),
        versions=versions, native_core=CORE is not None,
        processors=len(os.sched_getaffinity(0)), load=os.getloadavg()[0],
    )  # fmt: skip


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


def values(name: str) -> None:
    """Tell six losses beside those of the CPU, and how far they are from them."""
    expected = losses(name, *(("ltc", "llvm") if name in DRAWS_ON_THE_DEVICE else ("cpu", "llvm")))
    began = time.perf_counter()
    with metrics.counted() as grown:
        found = losses(name, "ltc", "xla")
    worst = max(abs(x - y) / max(abs(y), 1e-6) for x, y in zip(found, expected))
    cut_out = sorted(key for key in grown if key.startswith("CutOut::"))
    limit = LIMIT_OF_RESNET if name == "resnet18" else LIMIT
    tell(
        losses=found, expected=expected, error=worst, ok=worst <= limit, cut_out=cut_out,
        seconds=round(time.perf_counter() - began, 1),
    )  # fmt: skip


def losses(name: str, device: str, chosen: str) -> list[float]:
    mark = ltm.mark_step if device == "ltc" else (lambda: None)
    with config.override(LTC_BACKEND=chosen, LTC_TIER="native"):
        step = workload(name, device, Way(mark=mark))
        return [step().detach().double().item() for _ in range(STEPS)]


# --- times ---------------------------------------------------------------------------------------


OF_LTC = {
    "replayed": Way(mark=ltm.mark_step, compile_step=ltc.compile),
    "recorded": Way(mark=ltm.mark_step),
}


def of_ltc() -> Device:
    def memory_now() -> int | None:
        """JAX's peak is that of the process: it tells of the first workload alone."""
        return None if jax_memory().get("peak_bytes_in_use", 1) else 0

    def peak_memory() -> int:
        return jax_memory()["peak_bytes_in_use"]

    return Device("ltc", ltm.wait_device_ops, memory_now, peak_memory)


def jax_memory() -> dict[str, int]:
    import jax

    return jax.local_devices()[0].memory_stats() or {}


def timed(name: str) -> None:
    times(name, of_ltc(), OF_LTC)


def first(name: str) -> None:
    """Tell the time of the first step, in a process whose cache has its program."""
    allow_tf32()
    began = time.perf_counter()
    loss_of(workload(name, "ltc", OF_LTC["replayed"])())
    tell(first_s=round(time.perf_counter() - began, 3))


if __name__ == "__main__":
    parts = {"machine": machine, "values": values, "times": timed, "first": first}
    parts[sys.argv[1]](*sys.argv[2:])
