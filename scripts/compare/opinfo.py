"""Every operator of PyTorch's own table (`op_db`) on `ltc` against the CPU.

    python scripts/compare/opinfo.py                        the whole table
    python scripts/compare/opinfo.py --op add --op sum      two operators
    python scripts/compare/opinfo.py --variant gradient --json report.json --table remaining.txt

A case is one operator, one variant and one dtype, and is tried on up to six of PyTorch's samples:
    forward   float32, int64, bool: results, and the arguments after the call
    inplace   the in-place form in the same dtypes
    gradient  float64: results and gradients of all inputs
`--without-probe` asks the CPU's kernels for no types before they run: nothing may come out worse.
`--externs FILE` writes which operations Python ran inside compiled programs, and for how many cases.
A float32 result that is as near to float64's as the CPU's is equal, whatever the CPU's rounding.
A sample that the CPU refuses is left out, and a case of which it refuses every sample is not
counted; everything else that is not equal is a failure.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.testing._internal import common_methods_invocations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).parent))
import case_runner
from case_runner import Outcome
from operator_table import op_db

VARIANTS = {
    "forward": (torch.float32, torch.int64, torch.bool),
    "inplace": (torch.float32, torch.int64, torch.bool),
    "gradient": (torch.float64,),
}

# A result may differ by the rounding of a few operations in another order (about 2**-24 each in
# float32, 2**-53 in float64).  The error of a sum is relative to its terms, not to what is left of
# them, so the absolute part scales with the largest element of the expected tensor.
TOLERANCE = {"forward": (1e-5, 1e-6), "inplace": (1e-5, 1e-6), "gradient": (1e-9, 1e-10)}

# Operators whose results hold whatever was in memory: only shapes and dtypes can be compared.
UNINITIALISED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip

# Operators that read one argument on the CPU whatever the device: PyTorch refuses it elsewhere.
CPU_ARGUMENTS = {"tensor_split"}

REPEATS = 8  # draws of a random operator that are pooled for the distribution check
INDEPENDENT_DRAWS = 500  # at most: feature dropout draws one number for a whole channel
KS_LIMIT = math.sqrt(-math.log(1e-6 / 2) / 2)  # exceeded by chance once in 1e6


# PyTorch's table gives every random operator the same seed; here draws have to differ.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


class Different(Exception):
    """The device's answer is not the CPU's."""


class DifferentValues(Different):
    """Two results of the same kind, type and shape differ in values."""


class RefusedByCpu(Exception):
    """Eager PyTorch raises on this sample too."""


def case_names(variants=tuple(VARIANTS), operators=()) -> list[str]:
    """ "operator|variant|dtype" for every case of the table, operators in its order."""
    names = []
    for name, op in operators_by_name().items():
        if operators and op.name not in operators and name not in operators:
            continue
        for variant in variants:
            if variant == "inplace" and op.inplace_variant is None:
                continue
            if variant == "gradient" and not op.supports_autograd:
                continue
            names += [f"{name}|{variant}|{_text(d)}" for d in VARIANTS[variant] if d in op.dtypes]
    return names


@cache
def operators_by_name() -> dict:
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}


def run_case(name: str, device: str = "ltc", samples: int = 6) -> Outcome:
    operator, variant, dtype = name.split("|")
    op, dtype = operators_by_name()[operator], getattr(torch, dtype)
    check = {"forward": _check_forward, "inplace": _check_inplace, "gradient": _check_gradient}
    index, compared, refused = 0, 0, ""
    torch.manual_seed(zlib.crc32(name.encode()))  # the same samples alone and in a full run
    try:
        given = op.sample_inputs("cpu", dtype, requires_grad=variant == "gradient")
        for index, sample in enumerate(itertools.islice(given, samples)):
            try:
                check[variant](op, sample, device)
                compared += 1
            except RefusedByCpu as error:
                refused = str(error)
    except Exception as error:
        return _failure(name, error, f"sample {index}")
    if not compared:
        return Outcome(name, "refused", refused or "no samples")
    return Outcome(name, "equal", detail=" ".join(_run_by_python()))


EXTERN = "extern.python::"


def _run_by_python() -> list[str]:
    """The operations that compiled programs of this process left to Python since the last call."""
    from ltc.debug import metrics  # the parent only counts: it needs no device

    names = [name for name in metrics.counter_names() if name.startswith(EXTERN)]
    found = [name for name in names if metrics.counter_value(name) != _seen.get(name)]
    _seen.update((name, metrics.counter_value(name)) for name in names)
    return [name.removeprefix(EXTERN) for name in found]


_seen: dict[str, int] = {}


def externs(outcomes: list[Outcome]) -> str:
    """Return how many cases ran each operation in Python, the most frequent first."""
    counts = Counter(name for o in outcomes if o.status == "equal" for name in o.detail.split())
    with_any = sum(bool(o.detail) for o in outcomes if o.status == "equal")
    rows = [f"{count:5}  {name}" for name, count in counts.most_common()]
    return "\n".join([f"{with_any} cases of {len(outcomes)} ran an operation in Python", *rows])


def _failure(name: str, error: Exception, where: str) -> Outcome:
    status = "different" if isinstance(error, Different) else "error"
    text = " ".join(str(error).split())
    kind = "" if status == "different" else f"{type(error).__name__}: "
    return Outcome(name, status, f"{where}: {kind}{text[:200]}", traceback.format_exc()[-4000:])


def _check_forward(op, sample, device: str) -> None:
    arguments = (sample.input, sample.args, sample.kwargs)
    _compare_calls(op, op.op, arguments, device, "forward")


def _check_inplace(op, sample, device: str) -> None:
    arguments = (sample.input, sample.args, sample.kwargs)
    _compare_calls(op, op.inplace_variant, arguments, device, "inplace")


def _compare_calls(op, function: Callable, arguments, device: str, variant: str) -> None:
    on_cpu, on_device = copied(arguments), moved(op, arguments, device)
    expected = _on_cpu(function, on_cpu)
    found = call(function, on_device)
    if _is_random(function, arguments):
        _compare_random(function, arguments, expected, on_device, found)
        return
    only_types = op.name in UNINITIALISED
    try:
        _compare(expected, found, variant, "result", only_types)
    except DifferentValues:
        if not as_near_to_float64(function, arguments, expected, found):
            raise
        _compare(expected, found, variant, "result", only_types=True)
    after, after_on_device = _tensors(on_cpu), _tensors(on_device)
    _compare(after, after_on_device, variant, "argument after the call", only_types)


def as_near_to_float64(function: Callable, arguments, expected, found) -> bool:
    """Return True if no result is farther from float64's than the CPU's: its own rounding shows."""
    try:
        exact = _tensors(call(function, tree_map(_widened, copied(arguments))))
    except Exception:  # the operator has no float64
        return False
    return all(
        torch.equal(a, b.cpu()) or _distance(b.cpu(), true) <= _distance(a, true)
        for a, b, true in zip(_tensors(expected), _tensors(found), exact, strict=True)
    )


def _widened(leaf):
    single = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
    return leaf.double() if single else leaf


def _distance(a: torch.Tensor, true: torch.Tensor) -> float:
    """The largest; not a number where one of them is not finite."""
    return float((a - true).abs().max())


def _check_gradient(op, sample, device: str) -> None:
    arguments = (sample.input, sample.args, sample.kwargs)
    on_cpu, on_device = copied(arguments), moved(op, arguments, device)
    expected = _on_cpu(op.op, on_cpu)
    found = call(op.op, on_device)
    random = op.name in UNINITIALISED or _is_random(op.op, arguments)
    _compare(expected, found, "gradient", "result", random)
    post = sample.output_process_fn_grad
    try:
        expected_gradients = _gradients(post(expected), on_cpu)
    except Exception as error:
        raise RefusedByCpu(f"backward: {error}") from error
    _compare(expected_gradients, _gradients(post(found), on_device), "gradient", "gradient", random)


def _gradients(results, inputs) -> list:
    """Gradients of the inputs for cotangents between 0.5 and 1.5.

    Ones would hide every mistake in softmax and its like, whose gradients they cancel.
    """
    outputs = [t for t in _tensors(results) if t.requires_grad]
    leaves = [t for t in _tensors(inputs) if t.requires_grad]
    if not outputs or not leaves:
        return []
    cotangents = [_cotangent(t) for t in outputs]
    return list(torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True))


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    values = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64)
    return values.reshape(output.shape).to(output.dtype).to(output.device)


def _on_cpu(function: Callable, arguments):
    try:
        return call(function, arguments)
    except Exception as error:
        raise RefusedByCpu(f"{type(error).__name__}: {error}") from error


def call(function: Callable, arguments):
    first, rest, named = arguments
    return function(first, *rest, **named)


def _tensors(values) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def copied(arguments):
    """Equal arguments that share nothing with these; a tensor given twice stays one tensor."""
    copies: dict[int, torch.Tensor] = {}

    def copy(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return tree_map(copy, arguments)


def moved(op, arguments, device: str):
    """The same arguments on `device`, devices named in them included."""
    known: dict[int, torch.Tensor] = {}

    def move(leaf):
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            return leaf  # an error input that mixes devices
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in known:
                known[id(leaf)] = leaf.detach().to(device).requires_grad_(leaf.requires_grad)
            return known[id(leaf)]
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu"):
            return torch.device(device)
        return leaf

    if op.name in CPU_ARGUMENTS:
        return move(arguments[0]), *copied(arguments[1:])
    return tree_map(move, arguments)


def _compare(expected, found, variant: str, what: str, only_types: bool = False) -> None:
    """Raise Different where leaves differ in kind, dtype, shape or, unless `only_types`, value."""
    expected, found = tree_leaves(expected), tree_leaves(found)
    if len(expected) != len(found):
        raise Different(f"{what}: {len(found)} values, CPU {len(expected)}")
    for position, (a, b) in enumerate(zip(expected, found)):
        _compare_leaf(a, b, variant, f"{what} {position}", only_types)


def _compare_leaf(a, b, variant: str, what: str, only_types: bool) -> None:
    if not isinstance(a, torch.Tensor):
        if isinstance(a, torch.device) or a is b or only_types:
            return
        if isinstance(a, float) and math.isclose(a, b, rel_tol=TOLERANCE[variant][0]):
            return
        if type(a) is not type(b) or (a != b and a == a):
            raise Different(f"{what}: {b!r}, CPU {a!r}")
        return
    if not isinstance(b, torch.Tensor):
        raise Different(f"{what}: a {type(b).__name__}, CPU a tensor")
    for fact in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(a, fact) != getattr(b, fact):
            raise Different(f"{what}: {fact} {getattr(b, fact)}, CPU {getattr(a, fact)}")
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().cpu().resolve_conj().resolve_neg()
    if not only_types:
        _compare_values(a, b, variant, what)


def _compare_values(a: torch.Tensor, b: torch.Tensor, variant: str, what: str) -> None:
    relative, absolute = TOLERANCE[variant]
    if not (a.is_floating_point() or a.is_complex()) or a.layout is not torch.strided:
        relative = absolute = 0 if a.layout is torch.strided else absolute
    else:
        finite = a[a.isfinite()].abs()
        absolute *= max(1.0, float(finite.max()) if finite.numel() else 1.0)
    try:
        torch.testing.assert_close(
            b, a, rtol=relative, atol=absolute, equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        raise DifferentValues(f"{what}: {' '.join(str(error).split())}") from error


class _SeesRandomOps(TorchDispatchMode):
    """Notes whether any dispatched overload draws from a generator."""

    seen = False

    def __torch_dispatch__(self, overload, types, args=(), kwargs=None):
        self.seen |= torch.Tag.nondeterministic_seeded in overload.tags
        return overload(*args, **(kwargs or {}))


def _is_random(function: Callable, arguments) -> bool:
    """Return True if the call draws random numbers that its results depend on.

    The tag alone does not say: attention without dropout carries it too.
    """
    mode = _SeesRandomOps()
    with torch.random.fork_rng(devices=()):
        with mode, torch.no_grad():
            first = call(function, copied(arguments))
        if not mode.seen:
            return False
        for seed in range(16):  # a single coin falls the same way twice every other time
            torch.manual_seed(seed)
            with torch.no_grad():
                if not _same_bits(first, call(function, copied(arguments))):
                    return True
    return False


def _same_bits(results, others) -> bool:
    pairs = zip(_tensors(results), _tensors(others))
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _compare_random(function: Callable, arguments, expected, on_device, found) -> None:
    """Types of one draw, then the distribution of several."""
    _compare(expected, found, "forward", "random result", only_types=True)
    fresh = tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, on_device)
    ours, theirs = [found], [expected]
    if _tensors(on_device) and any(t is f for t in _tensors(on_device) for f in _tensors(found)):
        return  # in place: a second draw would start from the first
    for _ in range(REPEATS - 1):
        ours.append(call(function, fresh))
        theirs.append(call(function, copied(arguments)))
    for position, (a, b) in enumerate(zip(_pooled(theirs), _pooled(ours))):
        distance = _largest_distance(a, b)
        limit = KS_LIMIT * math.sqrt(2 / min(max(1, a.numel()), INDEPENDENT_DRAWS))
        if distance > limit:
            raise Different(
                f"random result {position}: distribution functions {distance:.3f} apart over "
                f"{a.numel()} draws, expected below {limit:.3f}"
            )


def _pooled(results: list) -> list[torch.Tensor]:
    """For each tensor of the results, the values of all draws in one line."""
    draws = [[t.detach().cpu().flatten() for t in _tensors(result)] for result in results]
    return [torch.cat(same) for same in zip(*draws) if not same[0].is_complex()]


def _largest_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The Kolmogorov-Smirnov statistic: the largest gap between the two distribution functions."""
    a, b = a.double().sort().values, b.double().sort().values
    both = torch.cat([a, b])
    gap = torch.searchsorted(a, both, right=True) / max(1, a.numel())
    gap -= torch.searchsorted(b, both, right=True) / max(1, b.numel())
    return float(gap.abs().max()) if gap.numel() else 0.0


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def share_equal(outcomes: list[Outcome]) -> float:
    """Percent of the cases that the CPU accepts."""
    counted = [outcome for outcome in outcomes if outcome.status != "refused"]
    return 100 * sum(o.status == "equal" for o in counted) / max(1, len(counted))


def report(outcomes: list[Outcome], target: float) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    remaining = [o for o in outcomes if o.status not in ("equal", "refused")]
    return (
        f"{case_runner.table(remaining)}\n"
        f"{', '.join(f'{count} {status}' for status, count in counts.most_common())}\n"
        f"equal: {share_equal(outcomes):.2f} % of the cases the CPU accepts (target {target} %)"
    )


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", default=[], help="an operator; may be repeated")
    parser.add_argument(
        "--variant",
        action="append",
        choices=list(VARIANTS),
        help="a way to call each operator; may be repeated; default: all",
    )
    parser.add_argument("--device", default="ltc", help="the device to test")
    parser.add_argument("--samples", type=int, default=6, help="samples of each operator")
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    parser.add_argument("--timeout", type=float, default=30, help="seconds for one case")
    parser.add_argument("--target", type=float, default=98.5, help="percent; below it, exit code 1")
    parser.add_argument("--json", help="write every outcome here")
    parser.add_argument("--table", help="write the cases that are not equal here")
    parser.add_argument("--externs", help="write the operations that Python ran here")
    parser.add_argument("--without-probe", action="store_true", help="types by Meta kernels alone")
    parser.add_argument(case_runner.WORKER, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def work(arguments: argparse.Namespace) -> None:
    import ltc  # noqa: F401  (the parent only counts: it needs no device)

    if arguments.without_probe:
        forbid_probe()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case_runner.serve(lambda name: run_case(name, arguments.device, arguments.samples))


def forbid_probe() -> None:
    """Every call is as one with large operands; what earlier processes found out is not read."""
    from ltc import config
    from ltc.device.shapes import cpu_probe

    cpu_probe.FEW_BYTES = -1
    config.override(LTC_CACHE="0").__enter__()


def main() -> int:
    arguments = arguments_of(sys.argv[1:])
    if arguments.worker:
        work(arguments)
        return 0
    names = case_names(tuple(arguments.variant or VARIANTS), arguments.op)
    outcomes = case_runner.run(
        Path(__file__).resolve(),
        names,
        ["--device", arguments.device, "--samples", str(arguments.samples)]
        + ["--without-probe"] * arguments.without_probe,
        arguments.processes,
        arguments.timeout,
    )
    text = report(outcomes, arguments.target)
    print(text)
    if arguments.json:
        case_runner.write(arguments.json, outcomes, {"share_equal": share_equal(outcomes)})
    if arguments.table:
        Path(arguments.table).write_text(text + "\n")
    if arguments.externs:
        Path(arguments.externs).write_text(externs(outcomes) + "\n")
    return int(share_equal(outcomes) < arguments.target)


if __name__ == "__main__":
    sys.exit(main())
