"""Damaged and crafted checkpoints, by the thousand: each is refused by name, or loads harmlessly.

    python scripts/stress/fuzz_checkpoints.py --count 10000 [--first 0] [--kind xser|archive]

A file is made from its number alone, so `--first N --count 1` repeats one. Files with flipped, lost
or added bytes must raise DamagedFile. Crafted ones, whose checksums are right and whose content is
not, may load if they are harmless: then every tensor is read. Anything else is a finding: another
error, a crash, more than 512 MB of memory, more than 10 seconds, a new file, code that ran.

An archive, a file of ltm.save that ltm.load reads, is only damaged: in each of its records and in its
directory. It must raise DamagedFile or give exactly what was saved.
"""

from __future__ import annotations

import argparse
import collections
import copy
import io
import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser

MEMORY_BYTES = 512 << 20
SECONDS = 10

Point = collections.namedtuple("Point", "x y")


def sample() -> Any:
    """Data with every kind of node."""
    x = torch.arange(24.0).reshape(4, 6)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return {
        "model": model.state_dict(),
        "views": [x, x[1], x.t(), x[:3], x.view(torch.int32)],
        "spans": [x.clone()[0:2]],
        "raw": torch.ones(2, 3, dtype=torch.complex128),
        "flags": torch.tensor([True, False]),
        "point": Point(1, x[0]),
        "set": {1, "a", (2, 3)},
        "numbers": [1.5, float("nan"), -7, 10**30, 3 + 4j, None, True, b"bytes", "text"],
        "types": [torch.bfloat16, torch.device("ltc:0"), torch.Size([2, 3]), frozenset({1})],
        "empty": torch.empty(0, 3),
        "wanted": torch.ones(2, requires_grad=True),
        "count": collections.Counter("aab"),
        "parameter": torch.nn.Parameter(torch.ones(1)),
    }


# --- damage -------------------------------------------------------------------------------------


def flipped(content: bytearray, choose: random.Random) -> bytearray:
    for _ in range(choose.choice([1, 1, 1, 5])):
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    return content


def flipped_in_header(content: bytearray, choose: random.Random) -> bytearray:
    content[choose.randrange(8 + header_length(content))] ^= 1 << choose.randrange(8)
    return content


def truncated(content: bytearray, choose: random.Random) -> bytearray:
    return content[: choose.choice([choose.randrange(len(content)), choose.randrange(16)])]


def lengthened(content: bytearray, choose: random.Random) -> bytearray:
    return content + choose.randbytes(choose.randrange(1, 100))


def with_a_hole(content: bytearray, choose: random.Random) -> bytearray:
    start = choose.randrange(len(content))
    del content[start : start + choose.randrange(1, 64)]
    return content


def with_another_length(content: bytearray, choose: random.Random) -> bytearray:
    length = choose.choice([0, 1, 1 << 63, (1 << 64) - 1, len(content), choose.getrandbits(30)])
    content[:8] = length.to_bytes(8, "little")
    return content


DAMAGES = (
    flipped,
    flipped_in_header,
    truncated,
    lengthened,
    with_a_hole,
    with_another_length,
)


def header_length(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


# --- craft --------------------------------------------------------------------------------------

STRANGE = (
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    -(2**70),
    10**400,
    0.5,
    1e308,
    True,
    False,
    None,
    "",
    "x",
    [],
    {},
    "../../etc/passwd",
    "/dev/zero",
    "\x00",
    "\ud800",
    "F32",
    "U8",
    "BOOL",
    "float64",
    "complex128",
    "tensor",
    "dict",
    "list",
    "tuple",
    "set",
    "namedtuple",
    "os",
    "system",
    "__class__",
    "__init__",
    [0],
    [-1],
    [2**62, 2**62],
    [1] * 100,
    [0, 2**62, 4],
    [[[[]]]],
    "nan",
    "ff" * 10,
    ["str", "a"],
    ["tensor", 0, {}],
    ["tensor", 10**9, {}],
    ["list", [0, 0]],
    ["dict", [0, 0, 0]],
    ["namedtuple", "os", "system", ["x"], [0]],
    ["device", "ltc:99"],
    ["dtype", "nn"],
    ["namedtuple", "builtins", "tuple", ["class"], [0]],
    ["set", [1]],
    ["none"],
    ["int", "0x1"],
    {"dtype": "float32", "shape": [1000, 1000], "strides": [0, 0], "offset": 0},
    {"dtype": "float32", "shape": [1 << 20, 1 << 19], "strides": [0, 0], "offset": 0},
    {"dtype": "float32", "shape": [3], "strides": [1 << 60], "offset": 1 << 60},
    {"dtype": "float64", "shape": [2], "strides": [1], "offset": -1},
    {"parameter": 1},
    {"requires_grad": True},
    {"dtype": "bool", "shape": [2], "strides": [1], "offset": 0},
)


def crafted(content: bytearray, choose: random.Random) -> bytes:
    """The file with a few places of its header replaced, and checksums that agree with it."""
    length = header_length(content)
    header, data = json.loads(content[8 : 8 + length]), bytes(content[8 + length :])
    metadata = header["__metadata__"]
    opened = {key: json.loads(metadata[key]) for key in ("ltc.tree", "ltc.order", "ltc.raw")}
    for _ in range(choose.choice([1, 1, 2, 4])):
        part = choose.choice([header, opened, opened, opened, metadata])
        replace_somewhere(part, choose)
    for key, value in opened.items():
        if key in metadata:
            metadata[key] = json.dumps(value)
    if choose.random() < 0.02:
        metadata["ltc.tree"] = "[" * choose.choice([10, 100_000])
    return summed(header, data)


def replace_somewhere(x: Any, choose: random.Random) -> None:
    """Replace, remove, repeat or rename one part, at a random depth."""
    while x:
        key = choose.choice(list(x)) if isinstance(x, dict) else choose.randrange(len(x))
        inner = x[key]
        if isinstance(inner, (dict, list)) and inner and choose.random() < 0.8:
            x = inner
            continue
        act = choose.random()
        if act < 0.7:
            x[key] = copy.deepcopy(choose.choice(STRANGE))
        elif act < 0.8:
            del x[key]
        elif isinstance(x, list):
            x.insert(choose.randrange(len(x)), copy.deepcopy(inner))
        else:
            x[str(choose.choice(STRANGE))] = x.pop(key)
        return


def summed(header: Any, data: bytes) -> bytes:
    """The bytes of a file whose header agrees with its own checksum wherever it has one."""
    text = bytearray(json.dumps(header, separators=(",", ":")).encode("utf-8", "replace"))
    text += b" " * (-len(text) % 8)
    content = bytearray(len(text).to_bytes(8, "little") + text)
    place = content.find(b'"ltc.header":"')
    if place == 8 + len('{"__metadata__":{'):
        digits = slice(place + 14, place + 22)
        content[digits] = b"0" * 8
        content[digits] = b"%08x" % zlib.crc32(content)
    return bytes(content) + data


# --- trial --------------------------------------------------------------------------------------


def mutated(number: int, original: bytes) -> tuple[bytes, bool]:
    """(file number `number`, whether it has to be refused)."""
    choose = random.Random(number)
    if number % 2:
        return crafted(bytearray(original), choose), False
    damaged = bytes(choose.choice(DAMAGES)(bytearray(original), choose))
    return damaged, damaged != original


def finding(number: int, original: bytes, folder: Path) -> str | None:
    """Return the error in the treatment of file `number`; None if all is well."""
    content, must_fail = mutated(number, original)
    path = folder / "file"
    path.write_bytes(content)
    started = time.perf_counter()
    try:
        loaded = xser.load(path, map_location="ltc" if number % 10 == 1 else None)
        outcome = "it loaded" if must_fail else None
        read_all(loaded)
    except xser.DamagedFile as error:
        outcome = None if str(path) in str(error) and len(str(error)) < 2000 else f"text: {error}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    if time.perf_counter() - started > SECONDS:
        outcome = "it took too long"
    if [file.name for file in folder.iterdir()] != ["file"]:
        outcome = "a file appeared"
    return outcome


def read_all(loaded: Any) -> None:
    """Use every element of every tensor, so that one outside of its memory would be noticed."""
    stack, met = [loaded], set()
    while stack:
        x = stack.pop()
        if id(x) in met:
            continue
        met.add(id(x))
        if isinstance(x, torch.Tensor):
            if x.numel() <= 10_000_000:
                x.detach().cpu().clone()
        elif isinstance(x, dict):
            stack.extend([*x.keys(), *x.values()])
        elif isinstance(x, (list, tuple, set, frozenset)):
            stack.extend(x)


# --- archives -----------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    """Return the content of the archive here: only objects that torch.load makes by default."""
    x = torch.arange(24.0)
    kinds = (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)
    made: dict[str, Any] = {str(kind): (x + 1).to(kind) for kind in kinds}
    return made | {"view": x[3:9], "base": x, "empty": x[:0], "numbers": [1.5, -7, "text", None]}


def stretch(start: int, end: int, choose: random.Random) -> tuple[int, int]:
    """A short part of the bytes [start, end)."""
    first = choose.randrange(start, end)
    return first, min(end, first + choose.choice([1, 4, 16, 64]))


def flipped_between(content: bytearray, start: int, end: int, choose: random.Random) -> None:
    for _ in range(choose.choice([1, 1, 3])):
        content[choose.randrange(start, end)] ^= 1 << choose.randrange(8)


def zeroed_between(content: bytearray, start: int, end: int, choose: random.Random) -> None:
    first, last = stretch(start, end, choose)
    content[first:last] = bytes(last - first)


def swapped_between(content: bytearray, start: int, end: int, choose: random.Random) -> None:
    (a, b), width = sorted(choose.choices(range(start, end), k=2)), choose.choice([1, 4, 8])
    if a + width <= b and b + width <= end:
        content[a : a + width], content[b : b + width] = (
            content[b : b + width], content[a : a + width],
        )  # fmt: skip


def exchange_records(content: bytearray, infos: list, choose: random.Random) -> None:
    """The bytes of two records of one length change places."""
    size = choose.choice([24, 192])
    first, second = choose.sample([info for info in infos if info.file_size == size], 2)
    a, b = (
        i.header_offset + 30 + sum(content[i.header_offset + 26 : i.header_offset + 30 : 2])
        for i in (first, second)
    )
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]


def damaged_archive(number: int, original: bytes) -> bytes:
    """An archive with one part damaged: a record, its header, the directory, or the length."""
    choose, content = random.Random(number), bytearray(original)
    with zipfile.ZipFile(io.BytesIO(original)) as archive:
        infos, directory = archive.infolist(), archive.start_dir
    starts = sorted(info.header_offset for info in infos) + [directory]
    places = [*itertools.pairwise(starts), (directory, len(content))]
    start, end = places[number % len(places)]  # every record, and the directory
    if choose.random() < 0.1:
        return bytes(choose.choice((truncated, lengthened, with_a_hole))(content, choose))
    if choose.random() < 0.1:
        exchange_records(content, infos, choose)
        return bytes(content)
    change = choose.choice((flipped_between, zeroed_between, swapped_between))
    change(content, start, end, choose)
    return bytes(content)


def finding_in_archive(number: int, original: bytes, folder: Path) -> str | None:
    """Return the error in the treatment of a damaged archive; None if all is well."""
    path, expected = folder / "file", state()
    content = damaged_archive(number, original)
    path.write_bytes(content)
    started = time.perf_counter()
    try:
        source = io.BytesIO(content) if number % 3 == 1 else path
        loaded = ltm.load(source, mmap=number % 3 == 2)
        outcome = None if same(loaded, expected) else "other values"
    except xser.DamagedFile as error:
        text = str(error)
        named = "BytesIO" if number % 3 == 1 else str(path)
        outcome = None if len(text) < 2000 and named in text else f"text: {text}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    return "it took too long" if time.perf_counter() - started > SECONDS else outcome


def same(x: Any, y: Any) -> bool:
    """True if two states are equal to the bit."""
    if isinstance(x, torch.Tensor):
        return x.dtype is y.dtype and x.shape == y.shape and x.tolist() == y.tolist()
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list):
        return len(x) == len(y) and all(map(same, x, y))
    return x == y


KINDS = {"xser": (xser.save, sample, finding), "archive": (ltm.save, state, finding_in_archive)}


def run(first: int, count: int, kind: str = "xser") -> dict[int, str]:
    """The findings among `count` files, by number."""
    findings = {}
    save, made, look = KINDS[kind]
    torch.manual_seed(0)  # files are made from their numbers alone
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        save(made(), folder / "file")
        original = (folder / "file").read_bytes()
        for number in range(first, first + count):
            found = look(number, original, folder)
            if found is not None:
                findings[number] = found
    return findings


def limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="number of files")
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--kind", choices=KINDS, default="xser", help="kind of the files")
    parser.add_argument("--here", action="store_true", help="in this process, as the parent asks")
    chosen = parser.parse_args(arguments)
    if not chosen.here:  # in a child, because a crash is a finding too
        command = [sys.executable, __file__, *arguments, "--here"]
        return subprocess.run(command).returncode
    run(chosen.first, 1, chosen.kind)  # whatever the first load needs is no part of the limit
    limit_memory()
    findings = run(chosen.first, chosen.count, chosen.kind)
    for number, found in list(findings.items())[:50]:
        print(f"file {number}: {found[:300]}")
    print(f"{chosen.count} files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
