"""One training step in eager PyTorch, torch.compile, ltc, JAX, torch_xla and Intel's extension, on one processor.

    python scripts/bench/comparison.py                              # what this Python has
    python scripts/bench/comparison.py --python torch_xla=/envs/xla/bin/python ipex=/envs/ipex/bin/python
    python scripts/bench/comparison.py --write ...                  # into docs/performance.md

torch_xla and intel_extension_for_pytorch need a torch of their own version, so each may have a Python of its own.
Each system trains three networks with AdamW and float32, from the same weights on the same batch, each in a process
of its own that is bound to one processor, with empty caches; ltc has its native core where that is built. The table
has milliseconds of processor time of a step, the fastest of some rounds, and the seconds on the clock until ten steps
were done. Exits with 1 if the losses of a system differ from eager PyTorch's by more than a hundredth.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
FIRST, STEPS, ROUNDS = 10, 100, 5
WARM_SECONDS = 2.0  # before and behind the programs that other processes compile
RATE, DECAY, BETAS, EPSILON = 1e-3, 0.01, (0.9, 0.999), 1e-8
PROGRAMS = {  # the layers; the shape of a batch
    "perceptron": ("linear 784 512, relu, linear 512 512, relu, linear 512 10", (128, 784)),
    "convolution": ("conv 1 16, gelu, flatten, linear 9216 10", (64, 1, 28, 28)),
    "small": ("linear 32 32, relu, linear 32 10", (8, 32)),
}
Step = Callable[[], Any]  # one training step; it returns the loss


def weights_of(layers: str) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """Return weight and bias of each layer that has them, the same for all systems."""
    draw, found = np.random.default_rng(0), list[tuple[np.ndarray, np.ndarray] | None]()
    for kind, *sizes in map(str.split, layers.split(", ")):
        if not sizes:
            found.append(None)
            continue
        inputs, outputs = map(int, sizes)
        shape = (outputs, inputs) if kind == "linear" else (outputs, inputs, 5, 5)
        bound = 1 / np.sqrt(np.prod(shape[1:]))
        drawn = (draw.uniform(-bound, bound, size) for size in (shape, (outputs,)))
        found.append(tuple(one.astype(np.float32) for one in drawn))
    return found


def batch_of(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(1)
    return draw.standard_normal(shape, dtype=np.float32), draw.integers(10, size=shape[0])


# --- PyTorch ----------------------------------------------------------------------------------------


def torch_network(layers: str) -> Any:
    import torch
    from torch import nn

    made = {
        "linear": nn.Linear, "conv": lambda a, b: nn.Conv2d(a, b, 5), "relu": nn.ReLU,
        "gelu": nn.GELU, "flatten": nn.Flatten,
    }  # fmt: skip
    network = nn.Sequential(
        *(made[kind](*map(int, sizes)) for kind, *sizes in map(str.split, layers.split(", ")))
    )
    with torch.no_grad():
        for layer, values in zip(network, weights_of(layers)):
            if values is not None:
                layer.weight.copy_(torch.from_numpy(values[0]))
                layer.bias.copy_(torch.from_numpy(values[1]))
    return network


def torch_step(
    program: str,
    device: Any = "cpu",
    mark: Callable[[], object] = lambda: None,
    prepare: Callable[[Any, Any], tuple[Any, Any]] = lambda model, optimizer: (model, optimizer),
) -> Step:
    """Return the step as PyTorch's users write it.

    Args:
        program: Its name in the table of programs.
        device: The device of model and batch.
        mark: Ends a step.
        prepare: Makes of model and optimizer what the system wants.
    """
    import torch

    torch.set_num_threads(1)
    layers, shape = PROGRAMS[program]
    model = torch_network(layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    model, optimizer = prepare(model, optimizer)
    x, y = (torch.from_numpy(one).to(device) for one in batch_of(shape))

    def step() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mark()
        return loss

    return step


def compiled(program: str) -> Step:
    import torch

    def prepare(model: Any, optimizer: Any) -> tuple[Any, Any]:
        optimizer.step = torch.compile(optimizer.step)
        return torch.compile(model), optimizer

    return torch_step(program, prepare=prepare)


def ltc_step(program: str) -> Step:
    import ltc.core.lazy_model as ltm

    return torch_step(program, "ltc", ltm.mark_step)


def ltc_compiled(program: str) -> Step:
    import ltc
    import ltc.core.lazy_model as ltm

    replayed = ltc.compile(torch_step(program, "ltc"))

    def step() -> Any:
        loss = replayed()
        ltm.mark_step()
        return loss

    return step


def torch_xla_step(program: str) -> Step:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla.core.xla_model as xm

    return torch_step(program, xm.xla_device(), xm.mark_step)


def ipex_step(program: str) -> Step:
    import intel_extension_for_pytorch as ipex

    return torch_step(
        program, prepare=lambda model, optimizer: ipex.optimize(model.train(), optimizer=optimizer)
    )


# --- JAX --------------------------------------------------------------------------------------------


def jax_step(program: str) -> Step:
    import jax
    import jax.numpy as jnp

    layers, shape = PROGRAMS[program]
    kinds = [one.split()[0] for one in layers.split(", ")]
    x, y = map(jnp.asarray, batch_of(shape))

    def loss_of(weights: Any) -> Any:
        value = x
        for kind, own in zip(kinds, weights):
            if kind == "linear":
                value = value @ own[0].T + own[1]
            elif kind == "conv":
                value = jax.lax.conv(value, own[0], (1, 1), "VALID") + own[1][:, None, None]
            elif kind == "flatten":
                value = value.reshape(value.shape[0], -1)
            else:
                value = (
                    jax.nn.gelu(value, approximate=False) if kind == "gelu" else jax.nn.relu(value)
                )
        return -jnp.take_along_axis(jax.nn.log_softmax(value), y[:, None], 1).mean()

    def updated(weights: Any, first: Any, second: Any, count: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights)
        each = jax.tree_util.tree_map
        count = count + 1
        first = each(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, gradients)
        second = each(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, gradients)
        one, two = (1 - beta**count for beta in BETAS)
        weights = each(
            lambda w, m, v: w * (1 - RATE * DECAY) - RATE * (m / one) / (jnp.sqrt(v / two) + EPSILON),
            weights, first, second,
        )  # fmt: skip
        return loss, weights, first, second, count

    weights = jax.tree_util.tree_map(jnp.asarray, weights_of(layers))
    zeros = jax.tree_util.tree_map(jnp.zeros_like, weights)
    state = [weights, zeros, jax.tree_util.tree_map(jnp.copy, zeros), jnp.zeros(())]
    jitted = jax.jit(updated, donate_argnums=(0, 1, 2, 3))

    def step() -> Any:
        loss, *state[:] = jitted(*state)
        return loss

    return step


SYSTEMS: dict[str, tuple[str, Callable[[str], Step]]] = {
    "eager": ("eager PyTorch", torch_step),
    "compile": ("torch.compile of model and optimizer", compiled),
    "ltc": ("ltc", ltc_step),
    "ltc_compile": ("ltc, the step under `ltc.compile`", ltc_compiled),
    "torch_xla": ("torch_xla", torch_xla_step),
    "ipex": ("Intel's extension (`ipex.optimize`)", ipex_step),
    "jax": ("JAX, written anew (`jax.jit`)", jax_step),
}
PACKAGES = {
    "eager": "torch", "compile": "torch", "ltc": "torch", "ltc_compile": "torch", "jax": "jax",
    "torch_xla": "torch_xla", "ipex": "intel_extension_for_pytorch",
}  # fmt: skip


def warm(step: Step) -> None:
    """Run a step for a while."""
    ends = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < ends:
        float(step())


# --- a process for each -----------------------------------------------------------------------------


def work(system: str, program: str) -> None:
    """Run one program; print its times, the losses of the first steps, and the version."""
    from importlib.metadata import version

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    make = SYSTEMS[system][1]
    step = make(program)  # imports and the network are no part of the first steps
    began = time.perf_counter()
    losses = [float(step()) for _ in range(FIRST)]
    first = time.perf_counter() - began
    warm(step)
    if system in ("ltc", "ltc_compile"):
        from ltc.runtime.background import compile_behind

        compile_behind.wait()
        warm(step)
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(STEPS):
            loss = step()
        float(loss)
        rounds.append((time.process_time() - began) / STEPS * 1e3)
    told = {"first": first, "ms": min(rounds), "losses": losses}
    print(json.dumps(told | {"version": version(PACKAGES[system])}), flush=True)
    os._exit(0)  # some systems' threads do not end


def asked_of(python: str, system: str, program: str) -> dict[str, Any] | str:
    """Return a worker's figures, or the last line of its error."""
    from clients import core_folder  # beside this file

    with tempfile.TemporaryDirectory() as folder:
        single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        environment = os.environ | {
            "LTC_CACHE_DIR": f"{folder}/ltc",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "LTC_NATIVE_DIR": core_folder(),
            "OMP_NUM_THREADS": "1",
            "LTC_HINTS": "0",
            "XLA_FLAGS": single if system in ("jax", "torch_xla") else "",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        command = [python, __file__, "--worker", system, program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [
        "| | version | " + " | ".join(f"{name}, ms" for name in PROGRAMS) + " | ten steps, s |",
        "|---|---|" + "---:|" * (len(PROGRAMS) + 1),
    ]
    for system, by_program in rows.items():
        found = [by_program[name] for name in PROGRAMS]
        versions = {one["version"] for one in found}
        firsts = [one["first"] for one in found]
        cells = [SYSTEMS[system][0], *versions, *(f"{one['ms']:.3g}" for one in found)]
        lines.append(f"| {' | '.join(cells)} | {min(firsts):.2g} to {max(firsts):.2g} |")
    return "\n".join(lines) + "\n"


def merged(old: str, new: str) -> str:
    """Return a table with new rows in place of those of the same system."""
    head, line, *rows = new.splitlines()
    found = {row.split("|")[1]: row for row in [*old.splitlines()[2:], *rows]}
    order = [f" {name} " for name, _ in SYSTEMS.values()]
    return "\n".join([head, line, *(found[name] for name in order if name in found)]) + "\n"


_TABLE = re.compile(r"^\| \| version \|.*?\n(?=\n)", re.M | re.S)


def compared(pythons: dict[str, str], names: list[str]) -> tuple[dict[str, dict[str, Any]], int]:
    """Run all systems, program by program; return those that have all rows, and the number of wrong ones."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    wrong = 0
    for program in PROGRAMS:
        for system in names:
            told = asked_of(pythons.get(system, sys.executable), system, program)
            if isinstance(told, str):
                print(f"{program:12} {system:12} {told}", flush=True)
                continue
            found[system][program] = told
            expected = found["eager"][program]["losses"]
            is_near = np.allclose(told["losses"], expected, rtol=0.01)
            wrong += not is_near
            print(
                f"{program:12} {system:12} {told['ms']:7.3f} ms, ten steps {told['first']:6.2f} s, "
                f"loss {told['losses'][-1]:.4f}{'' if is_near else ', WRONG'}",
                flush=True,
            )
    return {name: rows for name, rows in found.items() if len(rows) == len(PROGRAMS)}, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", nargs="+", default=[], metavar="SYSTEM=PATH", help="of a system"
    )
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="systems")
    parser.add_argument("--write", action="store_true", help="put the rows into the page's table")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(*asked.worker)
    names = ["eager", *(name for name in asked.only if name != "eager")]
    rows, wrong = compared(dict(one.split("=", 1) for one in asked.python), names)
    print("\n" + table(rows))
    if asked.write:
        new = _TABLE.sub(lambda old: merged(old[0], table(rows)), PAGE.read_text(), count=1)
        PAGE.write_text(new)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
