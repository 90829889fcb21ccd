"""Speed and memory of checkpoints next to plain files and to torch's own, measured in turns.

    python scripts/bench/bench_checkpoint.py [--megabytes 2048] [--rounds 5] [--folder /tmp]
    python scripts/bench/bench_checkpoint.py --large      a file above 4 GB comes back as it was

speed   each round does every case once, in another order, so that a change in the disk's mood meets
        all of them. Every write makes a new file, as one that keeps the old until the end has to,
        and is fsynced; reads come from the page cache. The ratio is the median over the rounds of
        (time of the plain case) / (time of this case): above 1 is faster.
memory  the growth of this process's peak over what it held before, measured by the kernel, in one
        run each. What a load returns is no part of it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser

TENSORS = 32  # of equal size, besides a thousand small ones
CHUNK_BYTES = 4 << 20


def state_of(megabytes: int, device: str) -> dict:
    """A state dict of about that size."""
    elements = (megabytes << 20) // TENSORS // 4
    generator = torch.Generator().manual_seed(0)
    state = {}
    for number in range(TENSORS):
        plain = torch.randn(elements, generator=generator)
        state[f"layer{number}.weight"] = plain.to(device)
    for number in range(1000):
        state[f"small{number}"] = torch.randn(64, generator=generator).to(device)
    return state


# --- cases --------------------------------------------------------------------------------------


def synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_plain(state: dict, path: Path) -> None:
    """The same bytes, written and synced."""
    with open(path, "wb") as file:
        for tensor in state.values():
            content = memoryview(tensor.view(torch.uint8).numpy())
            for start in range(0, len(content), CHUNK_BYTES):
                file.write(content[start : start + CHUNK_BYTES])
        file.flush()
        os.fsync(file.fileno())


def save_torch(state: dict, path: Path) -> None:
    torch.save(state, path)
    synced(path)


def read_plain(path: Path) -> None:
    """Into fresh memory, and one pass of crc32."""
    content = torch.empty(path.stat().st_size, dtype=torch.uint8).numpy()
    with open(path, "rb", buffering=0) as file:
        position = 0
        while position < len(content):
            position += file.readinto(content[position:])
    zlib.crc32(content)


def speeds(folder: Path, megabytes: int, rounds: int) -> None:
    plain = state_of(megabytes, "cpu")
    lazy = {name: tensor.to("ltc") for name, tensor in plain.items()}
    files = {name: folder / name for name in ("plain", "xser", "torch")}
    saves = {
        "write + fsync": lambda: write_plain(plain, files["plain"]),
        "xser.save": lambda: xser.save(lazy, files["xser"]),
        "torch.save + fsync": lambda: save_torch(plain, files["torch"]),
    }
    report(measured(saves, rounds, before=lambda: remove_all(folder)), megabytes)
    for save in saves.values():
        save()
    loads = {
        "read + crc32": lambda: read_plain(files["plain"]),
        "xser.load": lambda: xser.load(files["xser"]),
        "torch.load": lambda: torch.load(files["torch"]),
        "xser.load to ltc": lambda: xser.load(files["xser"], map_location="ltc"),
        "torch.load to ltc": lambda: torch.load(files["torch"], map_location="ltc"),
    }
    report(measured(loads, rounds), megabytes)


def remove_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def measured(
    cases: dict[str, Callable[[], object]], rounds: int, before: Callable[[], object] = int
) -> dict[str, list[float]]:
    """Seconds of each case, by round; the first round only warms up.

    Args:
        before: Called, untimed, before each case.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    choose = random.Random(0)
    for number in range(rounds + 1):
        for name in choose.sample(list(cases), len(cases)):
            before()
            started = time.perf_counter()
            cases[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def report(seconds: dict[str, list[float]], megabytes: int) -> None:
    reference = next(iter(seconds.values()))
    for name, times in seconds.items():
        ratio = statistics.median(r / t for r, t in zip(reference, times))
        median = statistics.median(times)
        print(f"{name:20} {median:8.3f} s {megabytes / median:8.0f} MB/s   ratio {ratio:5.2f}")


# --- memory -------------------------------------------------------------------------------------


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def peak_growth(act: Callable[[], object]) -> tuple[int, object]:
    """(bytes by which the process's peak exceeded what it held before, what `act` returned)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status_bytes("VmRSS")
    result = act()
    return status_bytes("VmHWM") - before, result


def memory_of_save(folder: Path, megabytes: int) -> None:
    state = state_of(megabytes, "ltc")
    sizes = [t.numel() * t.element_size() for t in state.values()]
    grown, _ = peak_growth(lambda: xser.save(state, folder / "state"))
    print(f"largest tensor {max(sizes) >> 20} MB, all {sum(sizes) >> 20} MB")
    print(f"xser.save         peak +{grown >> 20} MB")


def memory_of_ltm_save(folder: Path, megabytes: int) -> None:
    state = state_of(megabytes, "ltc")
    grown, _ = peak_growth(lambda: ltm.save(state, folder / "state.pt"))
    print(f"ltm.save          peak +{grown >> 20} MB")


def memory_of_load(folder: Path, megabytes: int) -> None:
    grown, state = peak_growth(lambda: xser.load(folder / "state", map_location="ltc"))
    payload = sum(t.numel() * t.element_size() for t in state.values())
    print(f"xser.load to ltc  peak +{(grown - payload) >> 20} MB beside the result")


PARTS = {"save": memory_of_save, "ltm": memory_of_ltm_save, "load": memory_of_load}


def memory(folder: Path, megabytes: int) -> None:
    """Each part in a fresh process, whose allocator keeps nothing of the other."""
    for part in PARTS:
        command = [sys.executable, __file__, "--part", part, "--folder", folder]
        subprocess.run([*map(str, command), "--megabytes", str(megabytes)], check=True)


# --- size ---------------------------------------------------------------------------------------


def large(folder: Path) -> None:
    """A tensor whose bytes, and one whose place, need more than 32 bits."""
    count = (4 << 30) + 12345
    long = torch.arange(count // 2, dtype=torch.int32).to(torch.int16)
    state = {"long": long, "last": torch.ones(3)}
    state["bytes"] = (state["long"].view(torch.uint8)[: count // 4] + 1).to("ltc")
    started = time.perf_counter()
    xser.save(state, folder / "large")
    loaded = xser.load(folder / "large")
    same = all(torch.equal(loaded[name], state[name].cpu()) for name in state)
    size = (folder / "large").stat().st_size
    seconds = time.perf_counter() - started
    print(f"{size} bytes, {'equal' if same else 'DIFFERENT'}, {seconds:.0f} s")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=2048, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="the folder to write to")
    parser.add_argument("--part", choices=PARTS, help="part of the memory figures, in this process")
    parser.add_argument("--large", action="store_true", help="round trip of more than 4 GB, alone")
    chosen = parser.parse_args(arguments)
    if chosen.part:
        PARTS[chosen.part](Path(chosen.folder), chosen.megabytes)
        return 0
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        if chosen.large:
            large(Path(folder))
            return 0
        memory(Path(folder), chosen.megabytes)
        speeds(Path(folder), chosen.megabytes, chosen.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
