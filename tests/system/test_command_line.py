"""`python -m ltc`: what it prints, and what it ends with."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ltc
from ltc import config
from ltc.command_line import _parser, main
from ltc.debug import environment
from ltc.support.disk_cache import disk_cache


def ltc_command(*arguments, **variables) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ltc", *map(str, arguments)],
        env={**os.environ, **variables}, capture_output=True, text=True,
    )  # fmt: skip


def facts(printed: str) -> dict[str, str]:
    return {line[:12].strip(): line[13:] for line in printed.splitlines()}


@pytest.fixture
def own_cache(tmp_path):
    with config.override(LTC_CACHE_DIR=str(tmp_path / "cache")):
        yield tmp_path / "cache"


def test_info_says_what_a_report_needs(tmp_path):
    done = ltc_command(
        "info", LTC_CACHE_DIR=str(tmp_path), LTC_NUM_DEVICES="2", LTC_CACHE_MBB="7",
        COMPILATION_CACHE_SIZE="9",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = facts(done.stdout)
    assert found["ltc"].startswith(ltc.__version__) and found["devices"] == "ltc:0, ltc:1"
    assert found["a program"] == "runs"
    assert "LTC_CACHE_PROGRAMS=9, by COMPILATION_CACHE_SIZE" in done.stdout
    assert found["unknown"] == "LTC_CACHE_MBB, which ltc does not read; did you mean LTC_CACHE_MB?"
    assert f"{tmp_path}: " in found["cache"]


def test_info_on_the_reference_backend():
    done = ltc_command("info", LTC_BACKEND="eager")
    assert facts(done.stdout)["a program"] == "runs", done.stderr


def test_info_says_why_no_program_runs(monkeypatch):
    def refuse(*args, **kwargs):
        raise MemoryError("no memory")

    monkeypatch.setattr(environment.torch, "arange", refuse)
    assert facts(environment.describe())["a program"] == "fails with MemoryError: no memory"


def test_the_cache_is_shown_and_cleared(own_cache, capsys):
    assert main(["cache"]) == 0 and "does not exist yet" in capsys.readouterr().out
    disk_cache().write("a" * 64, bytes(1 << 20))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.startswith(f"{own_cache}: 1 files, 1.0 of at most")
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.startswith(f"{own_cache}: 0 files, 0.0 of at most")


def test_a_cache_that_is_not_used_says_why(own_cache, capsys):
    own_cache.mkdir()
    own_cache.chmod(0o777)
    main(["cache"])
    assert f"not used: others can write to {own_cache}" in capsys.readouterr().out
    with config.override(LTC_CACHE=0):
        main(["cache", "--clear"])
    assert capsys.readouterr().out == "none: LTC_CACHE=0\n"


def test_a_script_runs_on_replicas(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, ltc.core.lazy_model as ltm\n"
        "print(sys.argv[1:], ltm.get_ordinal(), 'of', ltm.xrt_world_size())\n"
        "sys.exit(sys.argv[-1] == 'fail' and ltm.get_ordinal() == 1)\n"
    )
    status, said = main(["run", "2", str(script), "--epochs", "3"]), capfd.readouterr()
    lines = sorted(line.partition("] ")[2] or line for line in said.out.splitlines())
    assert status == 0, said.err
    assert [line.endswith(f"{k} of 2") for k, line in enumerate(lines)] == [True, True]
    assert main(["run", "2", str(script), "fail"]) == 1
    assert "rank 1" in capfd.readouterr().err.lower()


TRAINING = """
import os, sys, torch
import ltc.core.lazy_model as ltm

model = torch.nn.Linear(4, 2).to("ltc")
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
print("not shown")
for step in range(9):
    optimizer.zero_grad()
    loss = model(torch.rand(8, 4).to("ltc")).square().mean() + ADDED
    loss.backward()
    ltm.optimizer_step(optimizer, barrier=True)
    if step == 1:
        loss.item()
"""


def losses_on_the_cpu(count: int) -> list[str]:
    """What the script's losses are, by PyTorch alone, as the table shows them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    shown = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(torch.rand(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        shown.append(loss.item())
    return shown


def test_a_script_is_compared_eager_compiled_and_on_two_replicas(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING.replace("ADDED", "0"))
    done = ltc_command("check", "--backwards", 3, script, 0.5)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["eager", "1", "rank", "2", "ranks"]
    for k, expected in enumerate(losses_on_the_cpu(3)):
        assert rows[k + 1][:2] == ["loss", str(k + 1)]
        assert all(abs(float(text) - expected) < 1e-4 for text in rows[k + 1][2:])
    found = {" ".join(row[:-3]): row[-3:] for row in rows[4:9]}
    assert found["steps"] == ["3"] * 3 and found["reads"] == ["1"] * 3
    assert found["on the CPU"] == ["0"] * 3 and "loss 4" not in done.stdout
    assert "1 rank agrees with eager" in done.stdout and "not shown" not in done.stdout


def test_a_run_that_fails_and_one_that_computes_something_else_are_told(tmp_path):
    script = tmp_path / "train.py"
    wrong = "(os.environ.get('LTC_BACKEND') != 'eager') / (2 - ltm.xrt_world_size())"
    script.write_text(TRAINING.replace("ADDED", wrong))
    done = ltc_command("check", "--backwards", 2, script, 0.5, LTC_BACKEND="llvm")
    assert done.returncode == 1 and "2 ranks failed: Rank" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert "1 rank disagrees with eager" in done.stdout


def test_wrong_arguments_are_told(capsys):
    for arguments in ([], ["walk"], ["run", "2", "nowhere.py"], ["check", "nowhere.py"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "usage: python -m ltc" in capsys.readouterr().err


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"ltc {ltc.__version__}\n"


def test_types_are_told_to_type_checkers():
    assert (Path(ltc.__file__).parent / "py.typed").is_file()


_RANKS = """
import sys
import torch, ltc
import ltc.core.lazy_model as ltm

def train(rank):
    w = torch.ones(4, device="ltc", requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for _ in range(2):
        w.square().sum().backward()
        ltm.optimizer_step(optimizer)
        ltm.mark_step()

if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    ltc.launch(train, nprocs=2, start_method="fork")
    sys.exit(3)
"""


def test_profile_looks_at_a_script_and_at_the_ranks_it_starts(tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(_RANKS)
    done = ltc_command(
        "profile", "-o", out, "--html", script, "--epochs", "1",
        LTC_NUM_DEVICES="1",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "arguments ['--epochs', '1']" in done.stdout and str(out) in done.stderr
    tables = json.loads(out.read_text())["ltc"]
    assert sorted(process["rank"] for process in tables["processes"]) == [0, 1]
    assert len(tables["steps"]) == 4 and (tmp_path / "out.html").is_file()


def test_profile_of_what_is_not_there_says_so(capsys):
    with pytest.raises(SystemExit):
        main(["profile", "missing.py"])
    assert "there is no file missing.py" in capsys.readouterr().err


WRONG = {
    "run 0 train.py": "ltc run: error: argument replicas: expected an integer of at least 1, got '0'",
    "run two train.py": "replicas: expected an integer of at least 1, got 'two'",
    "run 2 missing.py": "ltc run: error: there is no file missing.py",
    "check --backwards -1 x.py": "--backwards: expected an integer of at least 1, got '-1'",
    "cache --clean": "ltc cache: error: unrecognized arguments: --clean Did you mean --clear?",
    "profile --htlm x.py": "unrecognized arguments: --htlm Did you mean --html?",
    "inof": "invalid choice: 'inof'; there are info, cache, .*. Did you mean info?",
    "dump one": "process: expected an integer of at least 1, got 'one'",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_named_with_the_usage_of_their_command(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert re.search(WRONG[words].replace("?", "[?]"), said), said
    command = words.split()[0]
    assert f"usage: python -m ltc {command if command != 'inof' else '['}" in said


ROOT = Path(__file__).resolve().parents[2]
IN_DOCS = sorted(
    {
        match[1].strip()
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for match in re.finditer(
            r"python -m ltc ((?:run|check|profile) [^`#|\n]*)", page.read_text()
        )
    }
)


@pytest.mark.parametrize("words", IN_DOCS)
def test_the_commands_of_the_docs_are_parsed(words):
    asked = _parser().parse_args(shlex.split(words))
    assert asked.script in ("train.py", "my_package.train")


def test_a_trace_that_is_missing_is_named(capsys):
    assert main(["report", "missing.json"]) == 1
    assert capsys.readouterr().err.startswith("There is no file missing.json.")


def test_an_error_of_a_command_is_a_line(capsys):
    with config.override(LTC_CACHE_MB="many"):
        assert main(["cache"]) == 1
    assert capsys.readouterr().err.startswith("python -m ltc cache: LTC_CACHE_MB=many: expected")


def test_an_option_behind_the_script_is_told_to_be_the_scripts(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    trace = str(tmp_path / "trace.json")
    assert main(["profile", "-o", trace, str(script), "--html", "page.html"]) == 0
    said = capfd.readouterr()
    assert "['--html', 'page.html']" in said.out
    assert "is given --html, since it stands behind the script" in said.err


def test_only_programs_of_ltc_and_their_launchers_are_asked_where_they_are(capsys):
    assert main(["dump", "1"]) == 1
    assert "No signal was sent." in capsys.readouterr().err
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["bash", "-c", "echo ready; read"], **pipes) as shell:
        assert shell.stdout.readline() == b"ready\n"
        assert main(["dump", str(shell.pid)]) == 1
        assert f"Process {shell.pid} (bash) is no program of ltc's" in capsys.readouterr().err
        shell.communicate(b"\n")


def test_each_command_has_an_example(capsys):
    for command in ("info", "cache", "build", "run", "check", "profile", "report", "dump"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"example: python -m ltc {command} " in capsys.readouterr().out
