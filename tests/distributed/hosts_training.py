"""Losses of a replicated MNIST network and a GPT, as JSON, of processes that torchrun has started.

    scripts/cluster/two_hosts tests/distributed/hosts_training.py FOLDER [CASE]

Each rank writes FOLDER/<rank>: its losses, the kinds of exchanges that the host made, and what was
counted. In the case `dies` the last rank ends in the midst of training, in `differs` it runs another
program; the error is written, and the seconds that it took to come.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "examples" / "mnist"), str(ROOT / "scripts" / "bench")]
from model import MNIST
from workloads import Gpt

import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp
from ltc.backends.collective_runner import RUNNER
from ltc.debug import metrics

STEPS = 6


def mnist():
    """The network, and the batch of a step."""
    return MNIST(), lambda: (torch.randn(8, 1, 28, 28), torch.randint(10, (8,)))


def gpt():
    model = Gpt(vocabulary=32, width=16, layers=2, heads=2, length=16)
    return model, lambda: (torch.randint(32, (2, 16)), torch.randint(32, (2, 16)))


def losses(make, device, each=lambda step: None):
    """Train, with the same weights in all replicas and batches of their own."""
    torch.manual_seed(0)
    model, batch = make()
    model, found = model.to(device), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + ltm.get_ordinal())
    for step in range(STEPS):
        x, y = (part.to(device) for part in batch())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        each(step)
        ltm.optimizer_step(optimizer)
        ltm.mark_step()
        found.append(loss.detach())
    return [loss.item() for loss in found]


def trained(device):
    return {"mnist": losses(mnist, device), "gpt": losses(gpt, device)}


def spoiled(case, device):
    """Train, while the last rank does something else; return the error, and when it came."""
    is_last, began = ltm.get_ordinal() == ltm.xrt_world_size() - 1, 0.0

    def spoil(step):
        nonlocal began
        if step == STEPS // 2:
            ltm.wait_device_ops()
            began = time.monotonic()
            if is_last and case == "dies":
                os._exit(3)
            if is_last:
                ltm.all_reduce("max", torch.ones(3, device=device))

    try:
        losses(gpt, device, spoil)
        ltm.wait_device_ops()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    return {"error": ""}


def train(_, folder, case):
    device, kinds, start = ltm.lazy_device(), [], RUNNER[0].start

    def noted(replica, collective, operands):
        kinds.append(collective.kind)
        return start(replica, collective, operands)

    RUNNER[0].start = noted
    with metrics.counted() as grown:
        found = spoiled(case, device) if case else trained(device)
    found |= {"host": kinds, "cut_out": [name for name in grown if name.startswith("CutOut")]}
    Path(folder, str(ltm.get_ordinal())).write_text(json.dumps(found))


if __name__ == "__main__":
    lmp.spawn(train, args=(sys.argv[1], "".join(sys.argv[2:])))
