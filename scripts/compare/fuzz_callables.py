"""No call of PyTorch's public Python names with `ltc` tensors ends the process.

    python scripts/compare/fuzz_callables.py                       everything
    python scripts/compare/fuzz_callables.py --name torch.linalg.qr --seed 7
    python scripts/compare/fuzz_callables.py --device cpu          is it eager PyTorch's own fault?

Every public callable of torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.fft and
torch.special is called 20 times in a process of its own.  Most draws are a valid sample of
PyTorch's operator table, where it has one, with at most one argument changed; the others are put
together from the signature or from nothing.  Results are read.  Exceptions are fine; death by a
signal is the failure.  A callable that ends its process has the same draws once more on the CPU:
where those end it too the fault is eager PyTorch's own, listed but not counted.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import random
import sys
import warnings
import zlib
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).parent))
import case_runner
import opinfo
from case_runner import Outcome

NAMESPACES = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
}

# Callables that by nature end, block or reconfigure the process they are called in.
LEFT_OUT = {
    "torch.set_num_threads": "any number is obeyed: it may start thousands of threads",
    "torch.set_num_interop_threads": "any number is obeyed: it may start thousands of threads",
    "torch.set_vital": "prints at the end of the process",
    "torch.import_ir_module": "runs the program in the file it is given",
    "torch.import_ir_module_from_buffer": "runs the program in the bytes it is given",
    "torch.compile": "starts a C++ compiler for every draw",
    "torch.Tensor.set_": "takes any memory as a storage, and reads past its end by contract",
    "torch.from_file": "maps a file of any size the draw names",
}

DTYPES = (
    torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64, torch.bfloat16, torch.float16,
)  # fmt: skip
SHAPES = (
    (), (0,), (1,), (3,), (2, 3), (3, 3), (1, 3, 4), (2, 3, 4), (0, 3), (2, 2, 3, 3),
    (1, 2, 2, 4, 4),
)  # fmt: skip
STRINGS = (
    "", "sum", "mean", "none", "cpu", "ij", "ij,jk->ik", "reflect", "bilinear", "fro", "nuc",
    "other",
)  # fmt: skip
INTEGERS = (0, 1, 2, 3, 4, -1, -2, -5, 7, 100, 2**40, 2**63 - 1, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 0.5, 2.5, 1e-9, 1e30, float("inf"), float("-inf"), float("nan"))


def names() -> list[str]:
    """The dotted name of every callable that is tried."""
    found = []
    for prefix, owner in NAMESPACES.items():
        for name in sorted(set(dir(owner))):
            full = f"{prefix}.{name}"
            if not name.startswith("_") and full not in LEFT_OUT and callable(getattr(owner, name)):
                found.append(full)
    return found


def run_case(name: str, device: str, draws: int, seed: int) -> Outcome:
    """Try the callable; "survived" with the number of calls that returned."""
    prefix, _, attribute = name.rpartition(".")
    function = getattr(NAMESPACES[prefix], attribute)
    returned = 0
    for draw in range(draws):
        chance = random.Random(f"{seed} {name} {draw}")
        torch.manual_seed(zlib.crc32(f"{seed} {name} {draw}".encode()))
        arguments, named = draw_arguments(name, function, chance, device)
        print(f"draw {draw}: {name}{brief(arguments, named)}", file=sys.stderr, flush=True)
        returned += _survive(function, arguments, named)
    return Outcome(name, "survived", f"{returned} of {draws} calls returned")


def _survive(function, arguments, named) -> bool:
    try:
        read(function(*arguments, **named))
        return True
    except (Exception, SystemExit):
        return False


def read(result) -> None:
    """Make every value ready, so that what was only recorded runs too, and print it."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            leaf.detach().cpu()
            repr(leaf)


def draw_arguments(name: str, function, chance: random.Random, device: str) -> tuple[tuple, dict]:
    """Mostly a valid sample of the operator with at most one argument changed, else anything."""
    samples = samples_of(name.rpartition(".")[2])
    if samples and chance.random() < 0.7:
        arguments, named = chance.choice(samples)
        arguments, named = tree_map(lambda leaf: _on(leaf, device), (arguments, named))
        return _changed(list(arguments), dict(named), chance, device)
    count, known = _signature(function)
    draw = chance.choice((_value, _tensor))
    arguments = tuple(draw(chance, device) for _ in range(chance.choice(count)))
    if name.startswith("torch.Tensor.") or chance.random() < 0.5:
        arguments = (_tensor(chance, device), *arguments)
    named = {key: _value(chance, device) for key in known if chance.random() < 0.15}
    if chance.random() < 0.1:
        named["out"] = _tensor(chance, device)
    return arguments, named


@cache
def samples_of(name: str) -> list[tuple[tuple, dict]]:
    """A few valid argument lists of the operator called `name`, on the CPU."""
    found = []
    for op in _operators().get(name.rstrip("_"), ()):
        dtypes = [dtype for dtype in DTYPES if dtype in op.dtypes][:2]
        for dtype in dtypes:
            try:
                given = list(itertools.islice(op.sample_inputs("cpu", dtype), 4))
            except Exception:
                continue  # no sample in this dtype: the other draws remain
            found += [((sample.input, *sample.args), sample.kwargs) for sample in given]
    return found


@cache
def _operators() -> dict[str, list]:
    by_name: dict[str, list] = {}
    for op in opinfo.op_db:
        for name in {op.name, *(alias.name for alias in op.aliases)}:
            by_name.setdefault(name.rpartition(".")[2], []).append(op)
    return by_name


def _on(leaf, device: str):
    return leaf.detach().to(device) if isinstance(leaf, torch.Tensor) else leaf


def _changed(arguments: list, named: dict, chance: random.Random, device: str) -> tuple:
    """The arguments with one replaced: by its like, by anything, or left away; or none at all."""
    kind = chance.choice(("none", "like", "like", "anything", "away"))
    holder = named if named and chance.random() < 0.4 else arguments
    if kind == "none" or not holder:
        return tuple(arguments), named
    place = chance.choice(list(named) if holder is named else range(len(arguments)))
    if kind == "away":
        del holder[place]
    elif kind == "like":
        holder[place] = _like(holder[place], chance, device)
    else:
        holder[place] = _value(chance, device)
    return tuple(arguments), named


def _like(value, chance: random.Random, device: str):
    """Another value of the same kind."""
    if isinstance(value, torch.Tensor):
        return _tensor(chance, device)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return chance.choice(INTEGERS if isinstance(value, int) else FLOATS)
    if type(value) in (list, tuple):
        return type(value)([_like(v, chance, device) for v in value])
    if isinstance(value, torch.dtype):
        return chance.choice(DTYPES)
    return chance.choice(STRINGS) if isinstance(value, str) else value


def _signature(function) -> tuple[tuple[int, ...], list[str]]:
    """Return how many positional arguments are worth trying, and the names of the others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # most of torch's callables are builtins without one
        return (0, 1, 1, 2, 2, 3, 4), ["dim", "keepdim", "dtype", "device"]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    counts = (required, required, min(required + 1, len(positional)), len(positional))
    return counts, [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _tensor(chance: random.Random, device: str) -> torch.Tensor:
    """A tensor of a random shape and dtype: plain, a view, or one that requires a gradient."""
    shape, dtype = chance.choice(SHAPES), chance.choice(DTYPES)
    value = torch.testing.make_tensor(shape, dtype=dtype, device="cpu").to(device)
    kind = chance.random()
    if kind < 0.1 and value.dim():
        return value.transpose(0, -1)
    if kind < 0.2 and value.dim():
        return value[:1]
    if kind < 0.3 and (dtype.is_floating_point or dtype.is_complex):
        return value.requires_grad_()
    return value


def _value(chance: random.Random, device: str):
    """Anything at all, most often a tensor on the device."""
    small = INTEGERS[:8]
    kinds = (
        lambda: _tensor(chance, device),
        lambda: [_tensor(chance, device) for _ in range(chance.randrange(4))],
        lambda: torch.ones(2, 3),
        lambda: chance.choice(small),
        lambda: chance.choice(INTEGERS),
        lambda: chance.choice(FLOATS),
        lambda: chance.choice((True, False, None)),
        lambda: chance.choice(STRINGS),
        lambda: chance.choice(DTYPES),
        lambda: chance.choice((torch.strided, torch.sparse_coo, torch.channels_last)),
        lambda: torch.device(device),
        lambda: tuple(chance.choice(small) for _ in range(chance.randrange(4))),
        lambda: slice(chance.choice(small), None),
        lambda: {"key": 1},
        object,
        lambda: lambda *values: values[0] if values else None,
    )
    return chance.choices(kinds, weights=[5] + [1] * (len(kinds) - 1))[0]()


def brief(arguments: tuple, named: dict) -> str:
    """The arguments without their values: enough to know the call again in a table."""

    def text(value) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype)[6:]}{list(value.shape)}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        return repr(value)[:40]

    return f"({', '.join([*map(text, arguments), *(f'{k}={text(v)}' for k, v in named.items())])})"


def last_draw(outcome: Outcome) -> str:
    lines = [line for line in outcome.detail.splitlines() if line.startswith("draw ")]
    return lines[-1] if lines else ""


def judged(outcomes: list[Outcome], arguments: argparse.Namespace) -> list[Outcome]:
    """The outcomes with the draw that ended each worker, and whether the CPU ends there too."""
    dead = [outcome.name for outcome in outcomes if outcome.status == "died"]
    on_cpu = {}
    if dead and arguments.device != "cpu":
        on_cpu = {o.name: o for o in run_all(dead, arguments, "cpu")}
    result = []
    for outcome in outcomes:
        status, reason = outcome.status, f"{outcome.reason} {last_draw(outcome)}".strip()
        if outcome.name in on_cpu and on_cpu[outcome.name].status == "died":
            status = "dies in eager PyTorch too"
        result.append(Outcome(outcome.name, status, reason, outcome.detail))
    return result


def run_all(cases: list[str], arguments: argparse.Namespace, device: str) -> list[Outcome]:
    return case_runner.run(
        Path(__file__).resolve(),
        cases,
        ["--device", device, "--draws", str(arguments.draws), "--seed", str(arguments.seed)],
        arguments.processes,
        arguments.timeout,
    )


def report(outcomes: list[Outcome]) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    remaining = [outcome for outcome in outcomes if outcome.status != "survived"]
    left_out = "\n".join(f"left out  {name}: {why}" for name, why in LEFT_OUT.items())
    return (
        f"{left_out}\n{case_runner.table(remaining)}\n"
        f"{', '.join(f'{count} {status}' for status, count in counts.most_common())}"
    )


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", action="append", default=[], help="a callable; may be repeated")
    parser.add_argument("--device", default="ltc", help="the device to test")
    parser.add_argument(
        "--draws", type=int, default=20, help="draws of arguments for each callable"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one callable")
    parser.add_argument("--json", help="write every outcome here")
    parser.add_argument(case_runner.WORKER, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def work(arguments: argparse.Namespace) -> None:
    if arguments.device != "cpu":
        import ltc  # noqa: F401  (the parent only counts: it needs no device)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case_runner.serve_in_forks(
        lambda name: run_case(name, arguments.device, arguments.draws, arguments.seed)
    )


def main() -> int:
    arguments = arguments_of(sys.argv[1:])
    if arguments.worker:
        work(arguments)
        return 0
    outcomes = run_all(arguments.name or names(), arguments, arguments.device)
    outcomes = judged(outcomes, arguments)
    print(report(outcomes))
    if arguments.json:
        case_runner.write(arguments.json, outcomes, dict(Counter(o.status for o in outcomes)))
    return int(any(outcome.status == "died" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
