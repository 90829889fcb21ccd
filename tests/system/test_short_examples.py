"""The short examples run on the CPU and on ltc, with the same result, and print both times."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SETTINGS = {
    "character_model": ["--steps", "12", "--width", "16", "--sampled", "8"],
    "tabular": ["--rows", "640", "--epochs", "3"],
    "augmented_images": ["--images", "320", "--epochs", "2", "--workers", "1"],
    "reinforcement": ["--rounds", "8", "--width", "16"],
    "fine_tuning": ["--steps", "6", "--width", "16"],
    "custom_vendor": ["--steps", "12", "--width", "8"],
    "several_hosts": ["--steps", "6", "--width", "16"],
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
NEEDS = {"fine_tuning": ("transformers", "accelerate")}
# Where torchvision does not fit the installed torch, transformers cannot be imported without this.
RUN = """
import runpy, sys
from tests import trainers
trainers.prepare_torchvision()
sys.path.insert(0, {folder!r})
sys.argv = [{file!r}, *{arguments!r}]
runpy.run_path({file!r}, run_name="__main__")
"""


@pytest.mark.parametrize("name", SETTINGS)
def test_an_example_has_the_same_result_on_both_devices(name):
    missing = [one for one in NEEDS.get(name, ()) if find_spec(one) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    file = EXAMPLES / f"{name}.py"
    script = RUN.format(folder=str(EXAMPLES), file=str(file), arguments=SETTINGS[name])
    command = ["-c", script]
    if name == "several_hosts":
        command = [*TORCHRUN, str(file), *SETTINGS[name]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LTC_CHECK": "0"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    told = dict(re.findall(r"^(cpu|ltc): (.*), [\d.]+ s$", done.stdout, re.M))
    assert set(told) == {"cpu", "ltc"}, done.stdout
    assert told["ltc"] == told["cpu"]


def test_each_short_example_is_tried():
    found = {file.stem for file in EXAMPLES.glob("*.py")} - {"on_both", "ray_train"}
    assert found == set(SETTINGS)
