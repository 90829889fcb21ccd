"""Measure the least cost of a device whose kernels are Python functions, beside eager PyTorch.

    python scripts/bench/recording_floor.py [PROGRAM ...] [--rounds 3] [--threads 2]

The programs of restless.py on a device that computes nothing: a kernel takes the type of its result
from a list of the same step before, and makes a tensor of it; a read gives a number at once. No
device that records by kernels in Python can be quicker, whatever it runs. Milliseconds of a step
are medians over new processes, the systems in turns; eager is the quickest of its ways to update
parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import restless_programs
import torch
from restless import WAYS
from restless_programs import HAVE_OPTIMIZER, RESTLESS
from torch._C import _acc

# Recurrent layers are left out: ltc records them as one call.
PROGRAMS = [name for name in RESTLESS if name not in ("lstm", "gru")]
STEPS = 40  # of other sizes, over and over
SECONDS = 2.0  # of one process
TRUE_ROWS = 17  # what a mask is said to choose
KEPT_IN_CPP = frozenset(
    """
    detach alias lift lift_fresh is_pinned _pin_memory detach_ set_data _version output_nr requires_grad_
    retain_grad is_same_size _has_same_storage_numel _fw_primal _make_dual _lazy_clone
""".split()
)

Type = tuple[tuple[int, ...], torch.dtype]
make = _acc.create_empty_tensor


class Plan:
    """The types of all results of a step, in order: found out the first time, then followed.

    Attributes:
        take: Gives the next one; IndexError where there is none yet.
    """

    def __init__(self) -> None:
        self._left: deque[Any] = deque()
        self.take = self._left.popleft
        self._of_step: dict[int, list[Any]] = {}
        self._found: list[Any] = []

    def begin(self, number: int) -> None:
        self._left.clear()
        self._left.extend(self._of_step.get(number, ()))
        self._found = self._of_step.setdefault(number, [])

    def found(self, types: Any) -> Any:
        self._found.append(types)
        return types

    def forget(self) -> None:
        self._of_step.clear()


def kernel_of(op: Any, plan: Plan) -> Callable[..., Any]:
    """The quickest kernel that Python can be."""
    schema, name = op._schema, op.overloadpacket.__name__
    if name == "_local_scalar_dense":
        return lambda x: 1
    if any(a.alias_info and a.alias_info.is_write for a in schema.arguments):
        if not schema.returns:
            return lambda *a, **k: None
        return lambda self, *a, **k: k.get("out", self)
    take = plan.take
    if [str(r.type) for r in schema.returns] == ["Tensor"]:

        def one(*args: Any, **kwargs: Any) -> torch.Tensor:
            try:
                shape, dtype = take()
            except IndexError:
                shape, dtype = plan.found(types_of(op, args, kwargs)[0])
            return make(shape, dtype)

        return one

    def several(*args: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
        try:
            types = take()
        except IndexError:
            types = plan.found(types_of(op, args, kwargs))
        made = [make(*type) for type in types]
        return made if len(schema.returns) == 1 else tuple(made)

    return several


def types_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Type]:
    if op.overloadpacket.__name__ == "index" and any(
        i is not None and i.dtype == torch.bool for i in args[1]
    ):
        return [((TRUE_ROWS, *args[0].shape[1:]), args[0].dtype)]
    options = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if "device" in [argument.name for argument in op._schema.arguments]:
        options["device"] = "meta"
    made = op(*on_meta(args), **options)
    found = [made] if isinstance(made, torch.Tensor) else made
    return [(tuple(x.shape), x.dtype) for x in found]


def on_meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return type(x)(map(on_meta, x)) if isinstance(x, (list, tuple)) else x


_kept: list[Any] = []  # C++ holds plain pointers to them


def begin_device(plan: Plan) -> None:
    """The device "nothing", with a kernel for every overload that needs one."""
    torch.ones(1, requires_grad=True).sum().backward()  # then the engine starts no thread for it
    torch._C._set_multithreading_enabled(False)
    torch.utils.rename_privateuse1_backend("nothing")
    answers: Any = types.ModuleType("torch.nothing")
    for name, answer in {"is_available": True, "device_count": 1, "current_device": 0}.items():
        setattr(answers, name, lambda answer=answer: answer)
    answers._is_in_bad_fork, answers.manual_seed_all = lambda: False, lambda seed: None
    torch._register_device_module("nothing", answers)

    class Hooks(_acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        is_built = is_available

        def has_primary_context(self, index: int) -> bool:
            return True

    class Guard(_acc.DeviceGuard):
        type_ = staticmethod(itertools.repeat(torch._C._autograd.DeviceType.PrivateUse1).__next__)

    library = torch.library.Library("aten", "IMPL")
    _kept.extend([Hooks(), Guard(), library])
    _acc.register_python_privateuseone_hook(_kept[0])
    _acc.register_python_privateuseone_device_guard(_kept[1])
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten" or packet in KEPT_IN_CPP:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"):
            op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if op is not None:
                library.impl(rest, kernel_of(op, plan), "PrivateUse1")


def measured(name: str, system: str, way: str, threads: int) -> float:
    """Milliseconds of a step in this process."""
    torch.set_num_threads(threads)
    plan, draws = Plan(), random.Random()
    restless_programs.random = types.SimpleNamespace(Random=lambda seed: draws)  # type: ignore[assignment]
    if system == "nothing":
        begin_device(plan)
    step = RESTLESS[name](system, lambda: None, **WAYS[way])

    def steps() -> float:
        begun = time.perf_counter()
        for number in range(STEPS):
            draws.seed(number)
            plan.begin(number)
            step(number)
        return (time.perf_counter() - begun) / STEPS * 1e3

    steps()  # the optimizer's state is there
    plan.forget()
    steps()
    begun, found = time.perf_counter(), []
    while time.perf_counter() < begun + SECONDS:
        found.append(steps())
    return statistics.median(found)


def in_a_new_process(name: str, system: str, way: str, threads: int) -> float:
    command = [sys.executable, "-W", "ignore", __file__, "--threads", str(threads)]
    done = subprocess.run(
        [*command, "--worker", name, system, way],
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "programs",
        nargs="*",
        choices=[[], *PROGRAMS],
        metavar="PROGRAM",
        help="programs to run; default: all",
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--threads", type=int, default=2, help="number of threads")
    parser.add_argument(
        "--worker", nargs=3, metavar=("PROGRAM", "SYSTEM", "WAY"), help=argparse.SUPPRESS
    )
    chosen = parser.parse_args()
    if chosen.worker:
        print(json.dumps(measured(*chosen.worker, chosen.threads)))
        return
    print(f"{'':26s} {'eager ms':>9s} {'nothing ms':>10s} {'floor':>6s}")
    for name in chosen.programs or PROGRAMS:
        ways = list(WAYS) if name in HAVE_OPTIMIZER else [""]
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(chosen.rounds):
            for system, way in itertools.product(("cpu", "nothing"), ways):
                ms = in_a_new_process(name, system, way, chosen.threads)
                found.setdefault((system, way), []).append(ms)
        eager, nothing = (
            min(statistics.median(found[system, way]) for way in ways)
            for system in ("cpu", "nothing")
        )
        print(f"{name:26s} {eager:9.3f} {nothing:10.3f} {nothing / eager:6.2f}", flush=True)


if __name__ == "__main__":
    main()
