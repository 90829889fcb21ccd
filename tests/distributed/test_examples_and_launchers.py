"""The examples for several replicas, and the scripts that start programs on several replicas."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ltc.utils.utils as xu

pytestmark = pytest.mark.devices(2)

ROOT = Path(__file__).parents[2]
EXAMPLES, SCRIPTS = ROOT / "examples" / "mnist", ROOT / "scripts" / "cluster"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
WAYS = {
    "threads": ((sys.executable,), "train_threads.py"),
    "processes": ((sys.executable,), "train_processes.py"),
    "torchrun": (TORCHRUN, "train_processes.py"),
}
ALONE = ((sys.executable,), "train.py")


def run(*command, check: bool = True) -> subprocess.CompletedProcess:
    """A command, as a user runs it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LTC_CHECK": "0"}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def weights_of(way: tuple, saved: Path) -> dict[str, torch.Tensor]:
    """The weights that an example saves after an epoch without dropout."""
    launcher, script = way
    run(
        *launcher,
        EXAMPLES / script,
        "--epochs",
        1,
        "--batch-size",
        256,
        "--dropout",
        0,
        "--save",
        saved,
    )
    return torch.load(saved)


@pytest.fixture(scope="module")
def weights_of_one(tmp_path_factory) -> dict[str, torch.Tensor]:
    return weights_of(ALONE, tmp_path_factory.mktemp("alone") / "one.pt")


@pytest.mark.parametrize("way", WAYS)
def test_two_replicas_train_as_one(way, tmp_path, weights_of_one):
    """All ways split the same batches, so they end with the weights of train.py."""
    two = weights_of(WAYS[way], tmp_path / "two.pt")
    for name, weight in weights_of_one.items():
        # 5 steps of float32 whose sums round in another order. After more, on one processor sooner
        # than on another (11 on an AMD EPYC), a maximum of a pooling falls on another element, and
        # the weights part.
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["threads", "processes"])
def test_two_replicas_reach_97_percent(way):
    launcher, script = WAYS[way]
    done = run(*launcher, EXAMPLES / script, "--target-accuracy", 97)
    assert "test accuracy" in done.stdout and "loss=" in done.stderr


def test_a_batch_that_does_not_divide_is_refused():
    done = run(sys.executable, EXAMPLES / "train_threads.py", "--batch-size", 33, check=False)
    assert done.returncode == 1 and "does not divide by 2 replicas" in done.stderr


PROGRAM = """
import sys
import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp

def add(rank):
    return rank

if __name__ == "__main__":
    print(sys.argv[1:], ltm.mesh_reduce("sum", ltm.get_ordinal(), sum), lmp.spawn(add))
    if "fail" in sys.argv and ltm.get_ordinal() == 1:
        sys.exit(4)
    sys.exit()
"""


def test_replicas_runs_a_script_on_several_replicas(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = run(sys.executable, SCRIPTS / "replicas", 2, script, "--x", 1)
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] ['--x', '1'] 1 [0, 1]" for rank in range(2)
    ]


def test_replicas_fails_with_the_rank_that_fails(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = run(sys.executable, SCRIPTS / "replicas", 2, script, "fail", check=False)
    assert done.returncode == 1
    assert "Rank 1" in done.stderr and "it called sys.exit(4)" in done.stderr


def test_hosts_prints_a_line_for_each_host():
    done = run(sys.executable, SCRIPTS / "hosts", "--hosts", "a,b", "--ranks", 2, "t.py", "--x", 1)
    lines = done.stdout.splitlines()
    assert [line.partition("$ ")[0] for line in lines] == ["a", "b"]
    words = shlex.split(lines[1].partition("$ ")[2])
    assert words[0] == "torchrun" and words[-3:] == ["t.py", "--x", "1"]
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--master-addr") + 1] == "a"


def hosts_check(*options: str, present: int) -> subprocess.CompletedProcess:
    """`scripts/cluster/hosts --check` of the first host, while it runs on all of the present ones.

    Another program may take the free port before they do: then they meet at another one.
    """
    while True:
        port = str(xu.get_free_tcp_ports()[0])
        command = [sys.executable, str(SCRIPTS / "hosts"), "--port", port, *options, "--check"]
        others = [
            subprocess.Popen([*command, str(host)], stdout=subprocess.DEVNULL)
            for host in range(1, present)
        ]
        done = run(*command, "0", check=False)
        if "EADDRINUSE" not in done.stdout:
            assert not any(other.wait() for other in others)
            return done
        for other in others:
            other.kill()
            other.wait()


def test_hosts_checks_that_all_can_talk():
    done = hosts_check("--hosts", "127.0.0.1,localhost", "--timeout", "600", present=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"127.0.0.1 <-> localhost: \d+ us for 1024 bytes, [\d.]+ GB/s", done.stdout)


def test_hosts_says_who_did_not_come():
    done = hosts_check("--hosts", "127.0.0.1,nobody", "--timeout", "1", present=1)
    assert done.returncode == 1 and "Not reached within 1 s: nobody" in done.stdout


# --- the lines of docs/clusters.md ----------------------------------------------------------------

CLUSTERS = (ROOT / "docs" / "clusters.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
SHELL = [text for kind, text in BLOCK.findall(CLUSTERS) if kind == "sh"]
(YAML,) = [text for kind, text in BLOCK.findall(CLUSTERS) if kind == "yaml"]
LINES = re.findall(r"torchrun --.*", "\n".join([*SHELL, YAML]))


@pytest.mark.parametrize("line", LINES)
def test_torchrun_takes_the_lines_of_the_page_on_clusters(line):
    from torch.distributed.run import parse_args

    words = shlex.split(re.sub(r"\$\w+", "1", line))[1:]
    taken = parse_args(words)
    assert taken.training_script.endswith("several_hosts.py") and not taken.training_script_args


@pytest.mark.parametrize("text", SHELL)
def test_the_shell_scripts_of_the_page_on_clusters_are_well_formed(text):
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_objects_of_kubernetes_on_the_page_on_clusters_fit_each_other():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(YAML)
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    first = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert f"--master-addr {first} " in container["args"][0]
    assert f"--nnodes {job['spec']['completions']} " in container["args"][0]
    volumes = {one["name"] for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
