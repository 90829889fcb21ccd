"""Whether ltc's results of a network are as near to float64's as those of eager PyTorch.

A result may be ten times as far from float64 as eager PyTorch's in the network's own dtypes, and by
some roundings of its largest number. Where it is farther, the float64 network runs again some times
with every value of it rounded at random: what that changes, the order of a sum may change too.
Where it is farther still, numbers may have cancelled to nothing, of which a norm makes something:
then each value is rounded relative to its tensor's largest number, and the small ones are 0.
"""

from __future__ import annotations

import functools
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm
from ltc import config
from tests.networks.attention_formula import AttentionByRows
from tests.networks.network import Network, Step, head, precision
from tests.networks.repetition import runs_of, wait_for_compilers
from tests.networks.roundings import RoundedInside, Rounding, finite, largest_of, rounded_updates

TIMES_EAGER = 10
# Roundings of a result's largest number: sums in another order in the wide dtypes, and in the
# narrow ones a value that is rounded on its way where eager PyTorch keeps it, or the other way.
ROUNDINGS = {
    torch.float64: 2.0**14, torch.float32: 64, torch.float16: 4, torch.bfloat16: 4,
}  # fmt: skip
NOISY_RUNS = 8
CANCELLED = 64  # roundings
TIMES_NOISE = 64


class Impossible(Exception):
    """The CPU refuses the network, too."""


@dataclass
class Verdict:
    """What became of a network.

    wrong    which result is wrong and how, or empty
    raised   what only ltc raised, or empty
    run      the number of the run that failed, where the network runs several times
    strict   results as near to float64 as eager PyTorch's
    widened  results that are as near only as random roundings are
    unjudged results whose NaNs and infinities, or all of whose digits, depend on a rounding
    """

    wrong: str = ""
    raised: str = ""
    strict: int = 0
    widened: int = 0
    unjudged: int = 0
    run: int = 0

    def __str__(self) -> str:
        return self.raised or self.wrong

    def add(self, other: Verdict) -> None:
        """Take over the failure of a later run, and add the counts of its results."""
        self.wrong, self.raised = other.wrong, other.raised
        self.strict += other.strict
        self.widened += other.widened
        self.unjudged += other.unjudged


@dataclass
class Draws:
    """The random numbers that ltc drew, for the CPU to repeat: the devices' streams differ.

    Of dropout it is ones that tell what was kept, drawn again: a zero that was kept is a zero.
    """

    taken: list[Callable[[], torch.Tensor]] = field(default_factory=list)

    def take(self, function: Callable, x: torch.Tensor, *arguments):
        state = torch.ltc.get_rng_state()
        result = function(x, *arguments)
        if function is F.dropout:
            self.taken.append(functools.partial(_kept, state, x.shape, x.dtype, *arguments))
        else:
            drawn = result.detach().clone()
            self.taken.append(lambda: drawn.cpu())
        return result

    def numbers(self) -> list[torch.Tensor]:
        """What was drawn, as soon as the network has run."""
        return [draw() for draw in self.taken]

    def repeat(self, following: list[torch.Tensor]) -> Callable:
        remaining = iter(following)

        def repeated(function: Callable, x: torch.Tensor, *arguments):
            drawn = next(remaining)
            if function is F.dropout:
                return x * ((drawn != 0).to(x.dtype) / (1 - arguments[0]))
            return drawn.to(x.dtype)

        return repeated


def _kept(state: torch.Tensor, shape: torch.Size, dtype: torch.dtype, p: float) -> torch.Tensor:
    """What dropout makes of ones where it draws what it drew in that state."""
    torch.ltc.set_rng_state(state)
    return F.dropout(torch.ones(shape, dtype=dtype, device="ltc"), p).cpu()


def judged(network: Network) -> Verdict:
    """Runs a network on ltc and on the CPU; raises Impossible where the CPU refuses it.

    With NETWORK_RUNS=repeated it runs as often as it takes to pass through every tier, with
    NETWORK_RUNS=steady as often at its own size.
    """
    runs = os.environ.get("NETWORK_RUNS", "once")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if runs == "once":
                return _judged(network)
            return _judged_each_time(network, runs == "steady")
        finally:
            torch.set_num_threads(1)


def _judged_each_time(network: Network, is_steady: bool) -> Verdict:
    verdict = Verdict()
    for verdict.run, one in enumerate(runs_of(network, is_steady)):
        verdict.add(_judged(one))
        if str(verdict):
            break
        wait_for_compilers()
    return verdict


def _judged(network: Network) -> Verdict:
    draws = Draws()
    try:
        names, ours = _on_ltc(network, draws)
        drawn = draws.numbers()
    except Exception as error:  # whatever it is: the CPU does not raise it
        _on_cpu(network)
        lines = str(error).strip().splitlines() or [""]
        return Verdict(raised=f"raised {type(error).__name__}: {lines[0]}")
    theirs = _on_cpu(network, draws.repeat(drawn))
    exact = _on_cpu(network, draws.repeat(drawn), torch.float64)
    spread = functools.partial(_spread, network, draws, drawn)
    by_rows = functools.cache(lambda: _by_rows(network, draws, drawn))
    return _compared(network, names, ours, theirs, exact, spread, by_rows)


def _compared(network, names, ours, theirs, exact, spread, by_rows) -> Verdict:
    verdict = Verdict()
    if [(tuple(x.shape), x.dtype) for x in ours] != [(tuple(x.shape), x.dtype) for x in theirs]:
        pairs = zip(names, ours, theirs)
        apart = [
            f"{name} is {tuple(x.shape)} {x.dtype}, on the CPU {tuple(y.shape)} {y.dtype}"
            for name, x, y in pairs if (x.shape, x.dtype) != (y.shape, y.dtype)
        ]  # fmt: skip
        return Verdict(wrong=(apart or [f"{len(ours)} results, on the CPU {len(theirs)}"])[0])
    spread = functools.cache(spread)
    for k, (name, x, y, z) in enumerate(zip(names, ours, theirs, exact)):
        allowed = _allowed(network, y, z)
        if _is_within(x, y, z, allowed):
            verdict.strict += 1
            continue
        more = spread()[k]
        if not torch.isfinite(more).all() or not _same_pattern(y, z):
            verdict.unjudged += 1
        elif _is_within(x, y, z, allowed + TIMES_NOISE * float(more.max()) + _of_nothing(network)):
            verdict.widened += 1
        elif _is_within_reach(x, y, z, allowed, spread(of_largest=True)[k]) or (
            not _same_pattern(x, y) and _is_right_in_a_wider_range(network)
        ):
            verdict.unjudged += 1
        elif not _same_pattern(x, y) and by_rows() and _is_within_rows(network, x, *by_rows()[k]):
            verdict.strict += 1
        else:
            verdict.wrong = verdict.wrong or (
                f"{name}, {tuple(x.shape)} {x.dtype}, is {_distance(x, z):.3g} from float64, eager "
                f"PyTorch {_distance(y, z):.3g}; allowed {allowed:.3g}, "
                f"random roundings make {float(more.max()):.3g}, largest {largest_of(z):.3g}"
            )
    return verdict


def _is_right_in_a_wider_range(network: Network) -> bool:
    """Of one in float16, which has no 1e-12 and no 1e5: what overflows, or is 0 / 0, does so or not
    by a rounding.  Its numbers are those of bfloat16, so they are the same in float32."""
    narrow = torch.float16
    if narrow not in (precision(network.dtype), precision(network.low)):
        return False
    dtype = "float32" if precision(network.dtype) is narrow else network.dtype
    try:
        return not str(_judged(replace(network, dtype=dtype, low="bfloat16")))
    except Impossible:
        return False


def _by_rows(network: Network, draws: Draws, drawn: list) -> list[tuple[torch.Tensor, ...]]:
    """The CPU's results and float64's where each row of attention reads what it sees alone.

    PyTorch's kernel multiplies what a mask hides by zero, which is NaN of an infinity, but for
    keys in later blocks of 512; and a row of minus infinities and NaNs it takes for hidden.
    """
    if not any("scaled_dot_product" in step.template for step in network.steps):
        return []
    with AttentionByRows():
        theirs = _on_cpu(network, draws.repeat(drawn))
        return list(zip(theirs, _on_cpu(network, draws.repeat(drawn), torch.float64)))


def _is_within_rows(network: Network, x, theirs, exact) -> bool:
    return _is_within(x, theirs, exact, _allowed(network, theirs, exact))


def _is_within_reach(x, theirs, exact, allowed: float, moved: torch.Tensor) -> bool:
    """Whether roundings that move a result so far make this one, too."""
    reach = allowed + TIMES_NOISE * float(moved.max())
    return not torch.isfinite(moved).all() or _is_within(x, theirs, exact, reach)


def _of_nothing(network: Network) -> float:
    """What may be left of numbers near 1 that cancel in float64, of which eager is no other judge."""
    exact = all(dtype is torch.float64 for dtype in _dtypes(network))
    return CANCELLED * torch.finfo(torch.float64).eps if exact else 0.0


def _allowed(network: Network, theirs: torch.Tensor, exact: torch.Tensor) -> float:
    """How far a result may be from float64's."""
    if not theirs.is_floating_point():
        return 0.0
    lowest = max((theirs.dtype, *_dtypes(network)), key=lambda dtype: torch.finfo(dtype).eps)
    eps = torch.finfo(lowest).eps
    return TIMES_EAGER * _distance(theirs, exact) + ROUNDINGS[lowest] * eps * largest_of(exact)


def _dtypes(network: Network) -> list[torch.dtype]:
    """The dtypes in which a network's values are."""
    found = [precision(network.dtype)]
    uses_low = network.autocast or any("low" in step.template for step in network.steps)
    return [*found, precision(network.low)] if uses_low else found


def _distance(x: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference of what is finite in both."""
    x, exact = finite(x, exact)
    return float((x - exact).abs().max()) if exact.numel() else 0.0


def _pattern(x: torch.Tensor) -> torch.Tensor:
    """0 for numbers, 1 and 2 for the infinities, 3 for NaN."""
    return torch.isposinf(x) * 1 + torch.isneginf(x) * 2 + torch.isnan(x) * 3


def _same_pattern(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool((_pattern(x.double()) == _pattern(y.double())).all())


def _is_within(x, theirs, exact, allowed: float) -> bool:
    return _same_pattern(x, theirs) and _distance(x, exact) <= allowed


# --- runs ---


def _function(network: Network, around: Callable[[Step], str] = Step.text, **names) -> Callable:
    there = head() | names
    exec(compile(network.function(around), "<network>", "exec"), there)
    return there["network"]


def _on_ltc(network: Network, draws: Draws) -> tuple[list[str], list[torch.Tensor]]:
    torch.set_num_threads(network.threads)
    torch.manual_seed(0)
    if os.environ.get("NETWORK_TIERS") == "changing":
        with config.override(LTC_TIER="auto"):  # afterwards as before, so that a seed repeats
            mark = ChangingTiers(random.Random(network.text()))
            for _ in range(2):  # what comes back is run in another way
                _function(network)("ltc", mark=mark)
            return _results_of(network, mark, draws)
    return _results_of(network, ltm.mark_step, draws)


def _results_of(
    network: Network, mark: Callable[[], object], draws: Draws
) -> tuple[list[str], list[torch.Tensor]]:
    names, results = _function(network)("ltc", mark=mark, random=draws.take)
    return names, [x.detach().cpu() for x in results]


class ChangingTiers:
    """A step mark after which programs are run in another way, drawn at random."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def __call__(self) -> None:
        ltm.mark_step()
        os.environ["LTC_TIER"] = self.source.choice(("native", "auto", "auto", "op_by_op"))


def _on_cpu(network: Network, random=None, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    more = {"random": random} if random else {}
    if dtype:
        more |= {"dtype": dtype, "low": dtype}
    try:
        _, results = _function(network)("cpu", **more)
    except Exception as error:
        raise Impossible(str(error)) from error
    return [x.detach() for x in results]


def _spread(
    network: Network, draws: Draws, drawn: list, of_largest: bool = False
) -> list[torch.Tensor]:
    """How far each result moves where every value is rounded at random; NaN where its kind does.

    A number is rounded relative to itself on the way forward, where an exact zero is mostly meant,
    and on the way back relative to the largest gradient that it is made of: there sums cancel.

    What calls round before their results, `RoundedInside` does, and optimizers, `rounded_updates`.

    of_largest  on the way forward, too, numbers are rounded relative to their tensor's largest
    """
    roundings = _roundings(network, draws, drawn)
    runs = []
    for run in range(NOISY_RUNS):
        function = _function(network, _named, rounded=Rounding(run, roundings, of_largest).rounded)
        dtype = precision(network.dtype)
        with RoundedInside(run, dtype), rounded_updates(run, dtype):
            _, results = function("cpu", torch.float64, torch.float64, random=draws.repeat(drawn))
        runs.append([x.detach().double() for x in results])
    exact = _on_cpu(network, draws.repeat(drawn), torch.float64)
    return [torch.stack([_moved(x, z) for x in others]) for z, *others in zip(exact, *runs)]


def _named(step: Step) -> str:
    """The step's expression, handed on with its name and its operands."""
    operands = ", ".join(f'"{name}": {name}' for name in step.operands)
    return f'rounded("{step.name}", {step.text()}, {{{operands}}})'


def _moved(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    if not _same_pattern(x, exact):
        return torch.tensor(float("nan"))
    return torch.tensor(_distance(x, exact))


def _roundings(network: Network, draws: Draws, drawn: list) -> dict[str, tuple[float, bool]]:
    """The unit roundoff of each value in its own dtype, and whether it shares no memory."""
    found: dict[str, tuple[float, bool]] = {}
    held: dict[int, object] = {}  # by address: what is held, no other can take

    def look(name: str, x, operands: dict):
        for other in operands.values():
            held[_memory(other)] = other
        if torch.is_tensor(x) and x.is_floating_point() and x.numel():
            found[name] = torch.finfo(x.dtype).eps / 2, _memory(x) not in held
            held[_memory(x)] = x
        return x

    function = _function(network, _named, rounded=look)
    function("cpu", random=draws.repeat(drawn))
    return found


def _memory(value) -> int:
    return value.untyped_storage().data_ptr() if torch.is_tensor(value) else id(value)
