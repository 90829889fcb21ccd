"""Scripts written for torch_xla run unmodified, under `ltc.compat.torch_xla`.

The stand-in changes torch for a whole process, so none of this runs in the tests' own.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "xla_scripts"
HELPERS = ("run", "claims", "mnist_processes")  # the last one runs from the command line
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in HELPERS)
CLAIMS = [
    node.name
    for node in ast.parse((FOLDER / "claims.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


def run(*arguments, path=ROOT, **variables) -> subprocess.CompletedProcess:
    """A Python of its own, with two devices, and no rank that a launcher gave to this one."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "LTC_NUM_DEVICES")
    environment = {name: text for name, text in os.environ.items() if name not in launcher}
    environment |= {"CPU_NUM_DEVICES": "2", "PYTHONPATH": str(path), **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """name of a claim or script -> its traceback; all run in one process, one after another."""
    done = run(FOLDER / "run.py", *SCRIPTS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*CLAIMS, *(path.stem for path in SCRIPTS)])
def test_it_holds_under_the_stand_in(outcomes, name):
    assert outcomes[name] == ""


def test_a_script_runs_from_the_command_line_and_its_processes_find_torch_xla():
    done = run("-m", "ltc.compat.torch_xla", FOLDER / "mnist_processes.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained by 2 processes\n")
    assert done.stdout.count("Training Device=xla:0 Epoch=2 Step=0") == 2


def test_a_script_gets_its_arguments_and_its_folder(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch_xla, beside\nprint(sys.argv[1:], __name__, beside.VALUE)\n"
    )
    done = run("-m", "ltc.compat.torch_xla", script, "--epochs", "3")
    assert done.stdout == "['--epochs', '3'] __main__ 5\n", done.stderr


def test_a_module_that_is_sent_to_another_process_takes_the_stand_in_along():
    program = (
        "import ltc.compat.torch_xla, pickle, torch_xla.core.xla_model as xm;"
        "print(pickle.dumps(xm).hex())"
    )
    sent = run("-c", program).stdout.strip()
    done = run("-c", f"import pickle; print(pickle.loads(bytes.fromhex({sent!r})).xla_device())")
    assert done.stdout == "xla:0\n", done.stderr


@pytest.mark.parametrize("arguments", [[], ["nowhere.py"]])
def test_without_a_script_it_says_what_is_missing(arguments):
    done = run("-m", "ltc.compat.torch_xla", *arguments)
    assert done.returncode == 1 and "python -m ltc.compat.torch_xla" in done.stderr
    assert "nowhere.py" in done.stderr or not arguments


def test_a_torch_xla_that_is_installed_is_not_hidden(tmp_path):
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("")
    done = run("-c", "import ltc.compat.torch_xla", path=f"{ROOT}{os.pathsep}{tmp_path}")
    assert "ImportError: torch_xla itself is installed" in done.stderr
    assert str(tmp_path) in done.stderr


def test_nothing_is_changed_for_those_who_do_not_ask_for_it():
    program = (
        "import torch; before = torch.Tensor.to, torch.tensor; import ltc, importlib.util as u;"
        "assert before == (torch.Tensor.to, torch.tensor) and u.find_spec('torch_xla') is None"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr


def test_its_folder_on_the_path_is_no_torch_xla():
    path = f"{ROOT}{os.pathsep}{ROOT / 'ltc' / 'compat'}"
    done = run("-c", "import torch_xla", path=path)
    assert "Write `import ltc.compat.torch_xla` before" in done.stderr
    done = run("-c", "import ltc.compat.torch_xla, torch_xla; print(torch_xla.device())", path=path)
    assert done.stdout == "xla:0\n", done.stderr
