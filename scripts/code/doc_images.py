"""Make the pictures of the docs: pages of small programs, as Chromium shows them.

    python scripts/code/doc_images.py               # docs/images/*.png, and what they were made of
    python scripts/code/doc_images.py --look FOLDER # the pages at 1280 and 500 pixels, light and dark, to look at
    python scripts/code/doc_images.py --look FOLDER --site build/site    # pages of the site as well

Each program runs five times, and the picture shows the run with the quickest steps: others may be busy. Programs are
waited for, so that what is compiled does not depend on that.

docs/images/made_of.txt has a fingerprint of the page's templates and of the programs. A test compares it, so that
a picture is made anew once the page has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "ltc" / "profiling" / "page"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
RUNS = 5
WIDE, NARROW = (1280, 1010), (500, 1400)

READS = """
import torch
from torch import nn
import ltc.core.lazy_model as ltm

layers = nn.Conv2d(1, 16, 5), nn.GELU(), nn.Flatten(), nn.Linear(9216, 10)
model = nn.Sequential(*layers).to("ltc")
optimizer = torch.optim.AdamW(model.parameters())
images, labels = torch.randn(64, 1, 28, 28).to("ltc"), torch.randint(10, (64,)).to("ltc")
total = 0.0
for step in range(40):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    total += loss.item()
    loss.backward()
    optimizer.step()
    ltm.mark_step()
"""
RANKS = """
import time
import torch
from torch import nn
import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp


def train(rank):
    model = nn.Linear(256, 256).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(512, 256).to("ltc")
    for step in range(30):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if rank == 1:
            time.sleep(0.02)  # its batches take longer to load
        ltm.optimizer_step(optimizer)
        ltm.mark_step()


if __name__ == "__main__":
    lmp.spawn(train, nprocs=2)
"""
PROGRAMS = {"report_reading.png": READS, "report_ranks.png": RANKS}


def made_of() -> str:
    """Return the fingerprint of the page's templates and of the programs."""
    parts = [
        file
        for file in sorted(PAGE.rglob("*"))
        if file.suffix in (".css", ".js", ".jinja", ".html")
    ]
    texts = [*(file.read_text() for file in parts), *PROGRAMS.values()]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def page_of(program: str, folder: Path) -> Path:
    """Run a program under the profiler some times; return the page of the run with the quickest steps."""
    runs = []
    for number in range(RUNS):
        place = folder / str(number)
        place.mkdir()
        (place / "train.py").write_text(program)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "LTC_HINTS": "0", "LTC_COMPILE_BEHIND": "0",
        }  # fmt: skip
        command = [sys.executable, "-m", "ltc", "profile", "--html", "train.py"]
        subprocess.run(command, cwd=place, env=environment, check=True)
        trace = json.loads((place / "ltc_profile.json").read_text())
        steps = trace["ltc"]["steps"]
        later = [one["end_us"] - one["begin_us"] for one in steps[len(steps) // 4 :]]
        runs.append((mean(later), place))
    return min(runs)[1] / "ltc_profile.html"


def shot(page: str, target: Path, size: tuple[int, int], is_dark: bool = False) -> None:
    """Take a picture of a page in a window of a size."""
    if CHROMIUM is None:
        raise SystemExit("needs chromium: apt-get install chromium")
    dark = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *dark,
                f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}",
                f"--screenshot={target}", page,
            ], check=True, capture_output=True,
        )  # fmt: skip


def look(page: str, name: str, folder: Path) -> None:
    """Take the four pictures to look at."""
    for width, size in (("1280", WIDE), ("500", NARROW)):
        for tone in ("light", "dark"):
            shot(page, folder / f"{name}_{width}_{tone}.png", size, tone == "dark")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--look", type=Path, help="folder for pictures to look at, in place of the docs'"
    )
    parser.add_argument("--site", type=Path, help="folder of the site that mkdocs has built")
    asked = parser.parse_args()
    for name, program in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as folder:
            page = page_of(program, Path(folder)).as_uri()
            if asked.look is None:
                shot(page, IMAGES / name, WIDE)
            else:
                asked.look.mkdir(parents=True, exist_ok=True)
                look(page, Path(name).stem, asked.look)
    if asked.look is None:
        (IMAGES / "made_of.txt").write_text(made_of() + "\n")
    for one in ("index", "performance/index", "reference/index") if asked.site else ():
        look(
            (asked.site.resolve() / f"{one}.html").as_uri(),
            f"site_{one.partition('/')[0]}",
            asked.look,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
