"""ltc is installed, and a program does not name it: nothing changes; or names it late: it works."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.plain_programs import FAMILIES

ROOT = Path(__file__).parents[2]


ABSENT = {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def run(*command: str, **variables: str) -> tuple[str, str]:
    """Output and errors of a Python program."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("LTC_TIER", "LTC_NUM_DEVICES")}
    done = subprocess.run(
        [sys.executable, *command], env=inherited | variables, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("family", ["quick", "slow"])
def test_programs_that_do_not_name_it_are_as_without_it(installed, family):
    report = partial(run, "-m", "tests.plain_programs", family)
    expected, said = report(**ABSENT)
    found, said_here = report(PYTHONPATH=installed)

    expected, found = json.loads(expected.splitlines()[-1]), json.loads(found.splitlines()[-1])
    assert expected.pop("about") == {"imported": False, "found": False}
    assert found.pop("about") == {"imported": False, "found": True}
    assert list(expected) == list(FAMILIES[family])
    assert {n: found[n] for n in expected if found[n] != expected[n]} == {}
    assert _without_times(said_here) == _without_times(said)


def _without_times(text: str) -> list[str]:
    """The lines of stderr; numbers are times, processes and addresses."""
    return [re.sub(r"\d+", "#", line) for line in text.splitlines() if "it/s" not in line]


BECOMES_AN_ACCELERATOR = """
import sys, torch
hidden = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
assert hidden == (None, 0) and not torch.accelerator.is_available()
assert torch.ltc.is_available() and "ltc" not in sys.modules  # whoever names it finds it
total = (torch.ones(3, device="ltc") * 2).sum()
assert total.item() == 6 and str(torch.accelerator.current_accelerator()) == "ltc"
assert torch.accelerator.device_count() == torch.ltc.device_count() == 1
assert torch._C._get_accelerator().type == "ltc" and torch.accelerator.current_device_index() == 0
assert torch.ones(2).pin_memory().tolist() == [1, 1]
torch.accelerator.synchronize()
torch.ones(2, requires_grad=True).to("ltc").sum().backward()
torch.compile(lambda x: (x + 1, torch.accelerator.is_available()), backend="eager")(total)
"""


def test_it_is_the_accelerator_from_its_first_use_on(installed):
    run("-c", BECOMES_AN_ACCELERATOR, PYTHONPATH=installed)


FIRST_NAMED = {
    "autocast": "torch.autocast('ltc', dtype=torch.bfloat16)",
    "a module's function": "torch.ltc.device_count()",
    "a file": "torch.load(written(), map_location='ltc')",
    "a model": "torch.nn.Linear(2, 2).to('ltc')",
    "a method": "torch.ones(2).ltc()",
    "a mesh": "torch.distributed.init_device_mesh('ltc', (1,))",
    "a group's backend": "group(backend='ltc')",
    "a group's backends": "group(backend='cpu:gloo,ltc:gloo')",
    "a group's device": "group(device_id=torch.device('ltc', 0))",
    "a backend of torch.compile": "torch.compile(lambda x: x + 1, backend='ltc')(torch.ones(2))",
    "number of processes": "torch.distributed.run.determine_local_world_size('ltc')",
}
NAMES_IT = """
import io, os, sys, torch, torch.distributed as dist
import torch.distributed.run
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
def group(**arguments):
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore(), **arguments)
def written():
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    return file
"""


@pytest.mark.parametrize("way", FIRST_NAMED)
def test_whoever_names_it_gets_it(installed, way):
    after = "assert 'ltc' in sys.modules and (torch.ones(2, device='ltc') + 1).tolist() == [2, 2]"
    run("-W", "ignore", "-c", f"{NAMES_IT}\n{FIRST_NAMED[way]}\n{after}", PYTHONPATH=installed)


RANK = """
import os, sys, torch, torch.distributed as dist
from torch.distributed import init_process_group  # a name that is bound before ltc is imported
{start}
assert ("ltc" in sys.modules) == {imported}
mine = dist.get_rank() + 1
x = torch.ones(3, device="ltc") * mine
dist.all_reduce(x)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2).to("ltc"))
model(torch.ones(4, 3, device="ltc") * mine).sum().backward()
gathered = [None, None]
dist.all_gather_object(gathered, mine)
on_cpu = torch.ones(2)
dist.all_reduce(on_cpu)
dist.barrier()
import ltc.core.lazy_model as ltm
total = ltm.all_reduce("sum", torch.ones(1, device="ltc") * mine)
gradient = model.module.weight.grad[0].tolist()
assert (x.tolist(), gradient, gathered, on_cpu.tolist()) == ([3.0] * 3, [6.0] * 3, [1, 2], [2.0] * 2)
assert ltm.xrt_world_size() == 2 and total.item() == 3
dist.destroy_process_group()
"""
BY_ARGUMENTS = """
rank, address = int(os.environ.pop("RANK")), "tcp://localhost:" + os.environ["MASTER_PORT"]
for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    del os.environ[name]
store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), 2, False)
init_process_group("gloo", store=store, rank=rank, world_size=2)
"""
STARTS = {
    "no backend": ("init_process_group()", False),
    "gloo": ("init_process_group('gloo')", False),
    "arguments": (BY_ARGUMENTS, False),
    "ltc": ("init_process_group('ltc')", True),
    "a group": ("init_process_group('gloo'); dist.barrier(dist.new_group(backend='ltc'))", True),
}


@pytest.mark.parametrize("way", STARTS)
def test_groups_made_before_its_first_use_carry_its_tensors(installed, tmp_path, way):
    start, imported = STARTS[way]
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(start=start, imported=imported))
    options = ("--standalone", "--nproc-per-node", "2")
    run("-W", "ignore", "-m", "torch.distributed.run", *options, str(script), PYTHONPATH=installed)
