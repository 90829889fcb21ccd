"""Libraries of CUDA's names that do nothing: torch's builds for CUDA load without 3 GB of NVIDIA's.

PyPI has no other builds of most versions for Linux. Each function says that there is no device, which
is all that torch asks for on a machine without one; what that means in words, its profiler asks as well.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

_NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE
_WORDS = "cuptiGetResultString"  # of a result; torch's profiler logs them
_OTHERS = re.compile(r"^(GLIBC|GLIBCXX|CXXABI|GCC|OMP|GOMP|LIB[A-Z]*GOMP)")


def put_stand_ins(libraries: Path) -> list[str]:
    """Write one for each library that those of torch need and lack; their names.

    Args:
        libraries: The folder torch/lib, where torch's own are looked for first.
    """
    torchs = sorted(libraries.glob("*.so*"))
    needed = {name for one in torchs for name in _needed(one)}
    lacking = {name for name in needed if not (libraries / name).exists() and _is_nvidias(name)}
    symbols = _symbols(torchs, lacking)
    for name in sorted(lacking):
        _write(libraries / name, symbols[name])
    return sorted(lacking)


def _is_nvidias(name: str) -> bool:
    return bool(re.match(r"lib(cu|nv|nccl)", name))


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _needed(library: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-dW", str(library)))


def _symbols(torchs: list[Path], lacking: set[str]) -> dict[str, dict[str, set[str]]]:
    """Return library -> version, "" without one -> names; other names go to the first library."""
    known = set()
    for one in torchs:
        known |= set(
            re.findall(r" [A-Z] ([^\s@]+)", _output("nm", "-D", "--defined-only", str(one)))
        )
    by_library: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    of_version = {}
    for one in torchs:
        needs = _output("readelf", "-VW", str(one))
        for file, rest in re.findall(r"File: (\S+)\s+Cnt: \d+((?:\n.*Name: .*)*)", needs):
            of_version.update(dict.fromkeys(re.findall(r"Name: (\S+)", rest), file))
    somebody = min(lacking, default="")
    for one in torchs:
        for name, version in re.findall(
            r" U ([^\s@]+)(?:@(\S+))?", _output("nm", "-D", "--undefined-only", str(one))
        ):
            library = of_version.get(version, somebody)
            if name not in known and not _OTHERS.match(version) and library in lacking:
                by_library[library][version].add(name)
    return by_library


def _write(place: Path, symbols: dict[str, set[str]]) -> None:
    names = sorted(set().union(*symbols.values())) if symbols else []
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder, "all.c"), Path(folder, "versions")
        source.write_text("".join(map(_function, names)))
        nodes = [
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(members))} }};\n"
            for version, members in symbols.items()
            if version
        ]
        versions.write_text("".join(nodes))
        script = [f"-Wl,--version-script={versions}"] if nodes else []
        compiler = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{place.name}"]
        subprocess.run([*compiler, *script, "-o", str(place), str(source)], check=True)


def _function(name: str) -> str:
    if name == _WORDS:
        return (
            f'long {name}(long result, const char **words) {{ *words = "no device"; return 0; }}\n'
        )
    return f"long {name}(void) {{ return {_NO_DEVICE}; }}\n"
