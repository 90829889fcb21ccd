"""Damaged disk caches, by the thousand: each is healed, and every result is that of the whole cache.

    python scripts/stress/damage_cache.py --count 10000 [--seed 0]

A small training fills a cache. Then, again and again, a few files of it are damaged: bits flipped,
ends cut off, bytes added, spans set to zero, two files exchanged, links and folders put in their
place, the key itself changed. The process forgets what it has in memory, as a new one would, and
trains again. A finding is: another loss than the first time, an error, more than one warning, or a
damaged file that is neither gone nor what it was.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

import ltc  # noqa: F401  adds the device
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.llvm.compiler import llvm_binding
from ltc.runtime.program_cache import PROGRAMS
from ltc.support import disk_cache

DAMAGED_AT_ONCE = 4


# --- damage -------------------------------------------------------------------------------------


def changed(path: Path, change: Callable[[bytearray], bytes]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flipped(path: Path, choose: random.Random) -> None:
    def change(content: bytearray) -> bytes:
        for _ in range(choose.choice([1, 1, 1, 8])):
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        return content

    changed(path, change)


def truncated(path: Path, choose: random.Random) -> None:
    changed(
        path, lambda content: content[: choose.choice([0, 4, 36, choose.randrange(len(content))])]
    )


def lengthened(path: Path, choose: random.Random) -> None:
    changed(path, lambda content: content + choose.randbytes(choose.randrange(1, 100)))


def with_zeros(path: Path, choose: random.Random) -> None:
    def change(content: bytearray) -> bytes:
        start = choose.randrange(len(content))
        length = min(choose.choice([1, 16, 512, len(content)]), len(content) - start)
        content[start : start + length] = bytes(length)
        return content

    changed(path, change)


def of_noise(path: Path, choose: random.Random) -> None:
    changed(path, lambda content: choose.randbytes(len(content)))


def exchanged(path: Path, choose: random.Random) -> None:
    other = choose.choice([one for one in files(path.parent) if one != path])
    for one, content in ((path, other.read_bytes()), (other, path.read_bytes())):
        one.write_bytes(content)


def as_link(path: Path, choose: random.Random) -> None:
    target = path.parent.parent / "elsewhere"
    shutil.move(path, target)
    path.symlink_to(target)


def as_folder(path: Path, choose: random.Random) -> None:
    path.unlink()
    path.mkdir()


def of_another_key(path: Path, choose: random.Random) -> None:
    """A whole entry of that name, as another machine's cache would hold it."""
    with tempfile.TemporaryDirectory() as folder:
        other = disk_cache.DiskCache(Path(folder) / "cache")
        other.write(path.name, path.read_bytes()[36:])
        shutil.copy(other.folder / path.name, path)


DAMAGES = (
    flipped, flipped, flipped, truncated, truncated, lengthened, with_zeros, with_zeros, of_noise,
    exchanged, as_link, as_folder, of_another_key,
)  # fmt: skip


# --- the cache and its use ----------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    """Return the kept files, without the key."""
    return sorted(p for p in folder.iterdir() if len(p.name) == 64 and p.is_file())


def forget() -> None:
    """Forget programs, kernels, answers and warned caches, as in a new process."""
    PROGRAMS.clear()
    disk_cache._caches.clear()
    llvm_binding.host.cache_clear()
    gc.collect()


def trained(layers: int = 2, extra: Iterable[nn.Module] = (), batch: int = 8) -> list[float]:
    """The losses of three steps of a small network."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(layers)]
    model = nn.Sequential(*blocks, *extra, nn.Linear(16, 4)).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(batch, 16).to("ltc"), torch.randint(4, (batch,)).to("ltc")
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ltm.mark_step()
        losses.append(loss.item())
    return losses


def finding_of(folder: Path, whole: dict[str, bytes], expected: list[float]) -> str | None:
    """Return the error of a run on the damaged cache; None if all is well."""
    forget()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = trained()
        except Exception as error:  # any is a finding
            return f"{type(error).__name__}: {error}"
        cache = disk_cache.disk_cache()
        assert cache is not None
        for name, content in whole.items():
            if (cache.read(name) or content[36:]) != content[36:]:
                return f"{name} is read with another content"
    if found != expected:
        return f"losses {found} instead of {expected}"
    warned = sum("ltc's cache" in str(one.message) for one in told)
    return f"{warned} warnings" if warned > 1 else None


def restored(folder: Path, whole: dict[str, bytes]) -> None:
    """Every file that was not needed, and so not made anew, as it was."""
    for name, content in whole.items():
        path = folder / name
        if path.is_dir():
            path.rmdir()
        if not path.is_file() or path.is_symlink() or path.read_bytes()[36:] != content[36:]:
            path.unlink(missing_ok=True)
            disk_cache.DiskCache(folder).write(name, content[36:])


def damage_and_train(
    count: int, choose: random.Random, counted: collections.Counter[str], findings: list[str]
) -> None:
    """Damage so many files of one cache, and count and judge what comes of it."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "cache"
        with config.override(LTC_CACHE_DIR=str(folder), LTC_TIER="native"):
            forget()
            expected = trained()
            whole = {path.name: path.read_bytes() for path in files(folder)}
            while counted.total() < count:
                done = []
                for path in choose.sample(files(folder), DAMAGED_AT_ONCE):
                    damage = choose.choice(DAMAGES)
                    if path.is_file() and path.stat().st_size:
                        damage(path, choose)
                        done.append(damage.__name__)
                if choose.random() < 0.02:
                    (folder / "key").write_bytes(choose.randbytes(choose.choice([0, 31, 32, 33])))
                    done.append("key")
                counted.update(done)
                if (finding := finding_of(folder, whole, expected)) is not None:
                    findings.append(f"{done}: {finding}")
                    print(findings[-1], flush=True)
                restored(folder, whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="files that are damaged in all")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    started = time.monotonic()
    counted: collections.Counter[str] = collections.Counter()
    findings: list[str] = []
    try:
        damage_and_train(options.count, random.Random(options.seed), counted, findings)
    finally:  # also where it is interrupted
        seconds = time.monotonic() - started
        print(f"{counted.total()} damages in {seconds:.0f} s: {dict(counted)}")
        print(f"{len(findings)} findings")
    return bool(findings)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
