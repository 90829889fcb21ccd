"""Measure what `import torch` costs more where ltc is installed and not used: processor time, in
ms.

python scripts/bench/import_torch.py [--rounds N]

Two processes take turns: torch finds ltc's entry point in one of them. Neighbours meet the same
load of the machine, so the median of their differences counts; exits with 1 if it is more than 10
ms. (Not to be run where ltc is installed already.)
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 10.0  # ms
PROGRAM = "import torch, time; print(hasattr(torch, 'ltc'), time.process_time() * 1e3)"


def installed(folder: Path) -> str:
    """A folder of packages that holds the entry point of ltc and the module that it names."""
    about = folder / "ltc-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ltc\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nltc = ltc_autoload:announce\n")
    shutil.copy(ROOT / "ltc_autoload.py", folder)
    return str(folder)


def processor_ms(folder: str, found: bool) -> float:
    """Processor time of a process that imports torch with that folder in its path."""
    settings = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, text=True, capture_output=True,
        env=settings | {"PYTHONPATH": folder}, cwd="/",
    ).stdout.split()  # fmt: skip
    assert said[0] == str(found), f"torch {'did not find' if found else 'found'} ltc"
    return float(said[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as with_ltc, tempfile.TemporaryDirectory() as without:
        installed(Path(with_ltc))
        processor_ms(with_ltc, True)  # writes the module's byte code
        pairs = [
            (processor_ms(without, False), processor_ms(with_ltc, True)) for _ in range(rounds)
        ]
    plain, found = (statistics.median(column) for column in zip(*pairs))
    print(f"import torch: {plain:.1f} ms, with ltc installed {found:.1f} ms, of {rounds} each")
    more = statistics.median(with_it - without_it for without_it, with_it in pairs)
    print(f"median of differences {more:+.1f} ms, at most {MOST}")
    return int(more > MOST)


if __name__ == "__main__":
    sys.exit(main())
