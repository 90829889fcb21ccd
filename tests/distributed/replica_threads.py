"""What four replicas exchange, as JSON, for whichever backend is set: threads of 1 or 2 processes.

    python tests/distributed/replica_threads.py CASE PROCESSES

Printed are the results of each replica, the kinds of exchanges that the host made, and what was counted.
"""

import dataclasses
import json
import os
import sys
import threading
import time
from collections import Counter

import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc.backends.collective_runner import RUNNER
from ltc.debug import metrics
from ltc.distributed import collectives
from ltc.distributed.data_parallel import DataParallel
from ltc.distributed.lazy_multiprocessing import spawn

REPLICAS = 4
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def own(device, *values, dtype=torch.float32):
    """A tensor from the host: the programs of all replicas are the same, whatever it holds."""
    return torch.tensor(values).to(dtype).to(device)


def kinds(device):
    """Each kind of exchange, in groups too, of numbers, and of nothing."""
    number = collectives.ordinal()
    x = own(device, *range(8)) + own(device, number)
    halves, pairs = [[0, 1], [2, 3]], [[0, 3], [1, 2]]
    found = [
        collectives.all_reduce("sum", x),
        collectives.all_reduce("sum", x.sum(), 0.25),
        collectives.all_reduce("sum", x[:0]),
        collectives.all_reduce("max", x, groups=halves),
        collectives.all_reduce("mul", x, groups=pairs),
        collectives.all_gather(x.reshape(2, 4), 1),
        collectives.all_gather(x, groups=pairs),
        collectives.reduce_scatter("sum", x, 1.0, 0, 4),
        collectives.reduce_scatter("max", x, 0.5, 0, 2, groups=pairs),
        collectives.all_to_all(x.reshape(4, 2), 0, 1, 4),
        collectives.all_to_all(x.reshape(4, 2), 1, 0, 2, groups=halves),
        collectives.collective_permute(x, [(0, 1), (1, 2), (3, 0)]),
    ]
    roots = [x, own(device, number, dtype=torch.bool), own(device, number, dtype=torch.bfloat16)]
    collectives.broadcast(roots, 2)
    grouped = [x + own(device, number if number in (1, 2) else torch.nan)]
    collectives.broadcast(grouped, 1, groups=pairs)
    return [*found, *roots, *grouped]


def dtypes(device):
    """Every reduction of every dtype."""
    number = collectives.ordinal()
    found = []
    for dtype in DTYPES:
        x = own(device, 1, 0, number, number + 2, dtype=dtype)
        bitwise = () if dtype.is_floating_point else ("and", "or")
        for kind in ("sum", "mul", "min", "max", *bitwise):
            found += [collectives.all_reduce(kind, x)]
            found += [collectives.reduce_scatter(kind, x, 1.0, 0, 4)]
    nan = own(device, torch.nan if number == 1 else 1.0)
    return [*found, collectives.all_reduce("max", nan), collectives.all_reduce("min", nan)]


def training(device, model, loader):
    """Losses of a training whose gradients are averaged."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        ltm.optimizer_step(optimizer)
        losses.append(loss.detach())
    weights = [parameter.detach() for parameter in model.parameters()]
    return [torch.stack(losses), *weights]


def one_reads(device):
    """One replica reads a value in the midst of a step, so its programs are others."""
    total = own(device, 0.0)
    for step in range(4):
        total = collectives.all_reduce("sum", total + own(device, 1.0))
        if collectives.ordinal() == 2 and step == 1:
            total.tolist()
        total = collectives.all_reduce("max", total * 2)
        ltm.mark_step(device)
    return [total]


def one_reads_between_scales(device):
    """The same, where the first sum has a scale that the host alone knows."""
    total = own(device, 1.0)
    for step in range(3):
        total = collectives.all_reduce("sum", total + own(device, 1.0), 0.3)
        if collectives.ordinal() == 2 and step == 1:
            total.tolist()
        total = collectives.all_reduce("max", total * 2)
        ltm.mark_step(device)
    return [total]


def one_sends(device):
    """Two replicas exchange a value in the step that all share."""
    x, number = own(device, 1.0, 2.0), collectives.ordinal()
    for _ in range(3):
        if number == 0:
            collectives.send(x, 1)
        if number == 1:
            x = collectives.recv(x, 0)
        x = collectives.all_reduce("sum", x + own(device, float(number)), 0.25)
        ltm.mark_step(device)
    return [x]


def one_adds_otherwise(device):
    total = collectives.all_reduce("sum", own(device, 1.0, 2.0))
    ltm.mark_step(device)
    kind = "max" if collectives.ordinal() == 3 else "sum"
    return [total, collectives.all_reduce(kind, total)]


def one_raises(device):
    total = collectives.all_reduce("sum", own(device, 1.0, 2.0))
    total.tolist()
    if collectives.ordinal() == 1:
        raise ValueError("no more of this")
    return [collectives.all_reduce("sum", total)]


def one_has_a_wrong_index(device):
    row = 9 if collectives.ordinal() == 1 else 1
    total = collectives.all_reduce("sum", own(device, 1.0, 2.0))
    picked = total[own(device, row, dtype=torch.int64)]
    return [collectives.all_reduce("sum", picked)]


def one_dies(device):
    total = own(device, 1.0, 2.0)
    for step in range(4):
        total = collectives.all_reduce("sum", total) / 4
        ltm.mark_step(device, wait=True)
        if collectives.ordinal() == 3 and step == 1:
            os._exit(3)
    return [total]


def beside_a_compilation(device):
    """The last of three equal steps, while another thread compiles for up to a minute."""
    x, seconds = own(device, 1.0, 2.0), 0.0
    for step in range(3):
        if step == 2 and collectives.ordinal() == 0:
            locked = threading.Event()
            threading.Thread(target=compile_for_long, args=(locked,), daemon=True).start()
            locked.wait()
        began = time.monotonic()
        total = collectives.all_reduce("sum", x)
        ltm.mark_step(device, wait=True)
        seconds = time.monotonic() - began
    return [total, own(device, float(seconds < 30))]


def compile_for_long(locked):
    from ltc.backends.xla.joint_computation import _compiling

    with _compiling:
        locked.set()
        time.sleep(60)


def one_is_late(device):
    """The second process computes 32 seconds longer before its first exchange than the first one."""
    return [collectives.all_reduce("sum", own(device, 1.0, 2.0))]


def delay_programs(seconds):
    """Have each joint program of this process start so late, behind what connects the processes."""
    from ltc.backends.xla import joint_computation as module

    compiled = module.program_of

    def late(*args):
        program = compiled(*args)

        def run(*arrays):
            time.sleep(seconds)
            return program.run(*arrays)

        return dataclasses.replace(program, run=run)

    module.program_of = late


CASES = (
    beside_a_compilation,
    one_is_late,
    one_dies,
    kinds,
    dtypes,
    training,
    one_reads,
    one_reads_between_scales,
    one_sends,
    one_adds_otherwise,
    one_raises,
    one_has_a_wrong_index,
)


def exchanged(case):
    """The results of each replica, the host's exchanges, and the counters of programs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(REPLICAS * 5)]
    kinds_of_host, start = [], RUNNER[0].start

    def noted(replica, collective, operands):
        kinds_of_host.append(collective.kind)
        return start(replica, collective, operands)

    def loop(model, loader, device, context):
        found = case(device, model, loader) if case is training else case(device)
        ltm.mark_step(device)
        return [x.cpu().double().tolist() for x in found]

    RUNNER[0].start = noted
    parallel = DataParallel(model, ltc.devices(), enumerate_batches=False)
    with metrics.counted() as grown:
        try:
            results, error = parallel(loop, batches), None
        except Exception as raised:
            results, error = None, f"{type(raised).__name__}: {raised}"
    wanted = "CutOut", "Uncached", "Replicas"
    counted = {name: grown[name] for name in grown if name.startswith(wanted)}
    return {"results": results, "error": error, "host": kinds_of_host, "counted": counted}


def of_processes(case, processes):
    """The same of all processes together."""
    try:
        told = spawn(rank, (case,), processes, start_method="spawn")
    except Exception as raised:
        return {"results": None, "error": f"{type(raised).__name__}: {raised}", "host": []}
    counted = Counter()
    for one in told:
        counted.update(one["counted"])
    error = next((one["error"] for one in told if one["error"]), None)
    results = None if error else [x for one in told for x in one["results"]]
    host = [kind for one in told for kind in one["host"]]
    return {"results": results, "error": error, "host": host, "counted": counted}


def rank(number, case):
    if case is one_is_late and number == 1:
        delay_programs(32)
    return exchanged(case)


if __name__ == "__main__":
    chosen, processes = {case.__name__: case for case in CASES}[sys.argv[1]], int(sys.argv[2])
    print(json.dumps(exchanged(chosen) if processes == 1 else of_processes(chosen, processes)))
