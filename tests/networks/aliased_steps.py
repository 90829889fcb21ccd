"""Step functions at random whose arguments share memory: with what they close over, and with each other.

Each is the text of a module with `make(compiled, device)`, which returns `call(number)` -> tensors.  From
call to call an argument is the same view, one of another offset or base, or a tensor of its own.
"""

from __future__ import annotations

import random
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.runtime.background import compile_behind

CALLS = 14
LOOP_CALLS = 36
TIERS = ("auto", "native")  # in this order: what one has compiled is there for the other
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # all is computed in float64, and stays small

BASES = ["w", "w", "p.detach()", "p.data", "cache['k']", "cache['v']", "held[0]", "GLOBAL"]
VIEWS = ["{b}", "{b}.detach()", "{b}[{k}]", "{b}[{k}]", "{b}[{k}:{k} + 2]", "{b}[:, {k}]",
         "{b}[:, {k}::2]", "{b}.t()[{k}]", "{b}[1:].t()[{k}]", "{b}.view(-1)[{k}:{k} + 5]",
         "{b}.chunk(4)[{k}]", "{b}.split(1)[{k}]", "{b}.unbind(1)[{k}]", "{b}.diagonal({k})",
         "{b}.narrow(1, {k}, 2)", "{b}.unfold(1, 2, 2)[{k}]", "{b}.movedim(0, 1)[{k}]",
         "w.as_strided((2, 3), (6, 1), {k})", "{b}[None].expand(2, 4, 6)[1, {k}]",
         "torch.view_as_real(torch.view_as_complex({b}.view(4, 3, 2)))[{k}]",
         "torch.view_as_complex({b}.view(4, 3, 2))[{k}].real"]  # fmt: skip
FRESH = ["fresh(n, 6)", "fresh(n, 4, 6)[{k}]", "fresh(n, 2, 3).t()", "fresh(n, {k} + 2)",
         "fresh(n, 6).requires_grad_()", "whole[:, :-1]", "whole[:, 1:]", "whole"]  # fmt: skip
OTHERS = ["last", "last[:1] if last.dim() else last", "(w if p.grad is None else p.grad)",
          "(w if p.grad is None else p.grad)[{k}]", "half", "w[{k}:].t()", "thing.part"]  # fmt: skip
THE_SAME = ["a", "a[:1]", "a.detach()", "a.view(a.shape)"]
READS = [
    "total = total + (a * 2).sum()",
    "total = total + (b * 0.5).sum()",
    "total = total + parts[0].sum() - parts[1].mean()",
    "total = total + w.sum()",
    "total = total + w[1:].t().sum() * 0.5",
    "total = total + cache['k'][1].sum()",
    "total = total + (cache['k'] * cache['v']).mean()",
    "total = total + held[0].square().mean() + held[1].sum()",
    "total = total + thing.part.sin().sum()",
    "total = total + GLOBAL[0].sum()",
    "total = total + half.mean()",
    "total = total + a.flatten()[0] * b.flatten()[0]",
    "total = total + table['x'].sum() * 0.25",
]
GRADIENTS = [
    "loss = (p * a.detach().mean()).sum()",
    "loss = (p * p).mean() * b.detach().mean() + p.sum()",
    "loss = p[1].sum() + (p.t()[2] * w[:, 1]).sum()",
    "loss = (a * 3).sum() + p.sum()",
    "loss = a.sum() * b.sum() + p[0].sum()",
]
WRITES = [
    "a.mul_(0.5).add_(1)",
    "b.sub_(0.25)",
    "parts[1].mul_(0.75)",
    "a.fill_(2.0)",
    "w.mul_(0.5)",
    "w[1].add_(1)",
    "w[:, 2] = 0.5",
    "cache['k'][1].copy_(w[2])",
    "cache['v'][2:] = 3.0",
    "held[0].sin_()",
    "thing.part[0].add_(0.5)",
    "GLOBAL.mul_(0.5)",
    "half.add_(0.125)",
    "table['x'].mul_(0.5)",
    "cache['k'][:1].add_(a.sum() * 0.125)",
    "p.data.mul_(0.9)",
]
OF_ARGUMENTS = 2 * [
    "a.mul_(0.5).add_(1)",
    "b.sub_(0.25)",
    "parts[1].mul_(0.75)",
    "table['x'].fill_(2.0)",
]
ENDS = ["total.detach()", "[total.detach(), a.detach()]", "(total.detach(), w)", "b.detach()",
        "{'total': total.detach(), 'part': parts[1].detach()}", "a.detach()[:1]", "p.grad",
        "total.detach() * 1, a.detach() * 2", "a", "cache['k'].detach()"]  # fmt: skip
BETWEEN = ["p.grad = None", "p.grad = w.detach() * 0.5", "p.grad = flat[:24].view(4, 6)",
           "cache['k'] = cache['k'].clone() if n % 5 == 4 else cache['k']",
           "held[0] = w if n % 6 > 3 else cache['v']", "thing.part = w[n % 2 :]",
           "w.mul_(0.5)", "flat.mul_(0.5)", "p.data = w if n == 7 else p.data",
           "w.data = fresh(n, 4, 6) if n == 6 else w.data"]  # fmt: skip

TEMPLATE = """
import torch

def fresh(n, *shape):
    count = torch.Size(shape).numel()
    return ((torch.arange(count, dtype=torch.float64) + n) % 7 / 4).reshape(shape).to(DEVICE)

class Thing:
    pass

def make(compiled):
    flat = fresh(3, 48)
    w, p = fresh(0, 4, 6), torch.nn.Parameter({parameter})
    cache, held, thing = {{"k": fresh(1, 4, 6), "v": {value}}}, [fresh(2, 4, 6), w[1:]], Thing()
    thing.part, half = {part}, w[2:]
    optimizer = torch.optim.SGD([p], lr=0.01{momentum})

    @compiled
    def step(a, b, parts, *, table):
        total = torch.zeros((), dtype=torch.float64, device=DEVICE)
{lines}

    def arguments(n, kind, last):
        whole = fresh(n, 2, 5)
{kinds}

    order, last = {order}, fresh(5, 6)

    def call(n):
        nonlocal last
        globals().update({named})
{between}
        a, b, c, d = arguments(n, order[n], last)
        found = step(a, b, [c, a], table={{"x": d}})
        every = [a, b, c, d, w, p, p.grad, *cache.values(), *held, thing.part, flat, GLOBAL]
        every += [x.grad for x in (a, b, c, d) if x.is_leaf]
        found = [*found.values()] if isinstance(found, dict) else found
        made = [*found] if isinstance(found, (list, tuple)) else [found]
        last = next((one for one in reversed(made) if one is not None), last)
        return every + made

    return call

GLOBAL = fresh(4, 4, 6)
"""


@dataclass
class AliasedStep:
    """One function.

    text     of its module
    unnamed  the same, where no global has the name of an attribute; None where it is that anyway
    """

    text: str
    unnamed: str | None

    def without_names(self) -> AliasedStep | None:
        return None if self.unnamed is None else AliasedStep(self.unnamed, None)

    def make(self, compiled: Callable, device: str) -> Callable[[int], list[Any]]:
        names: dict[str, Any] = {"__name__": "aliased_step", "DEVICE": device}
        exec(compile(self.text, "aliased_step.py", "exec"), names)
        made: Callable[[int], list[Any]] = names["make"](compiled)
        return made


def aliased_step(seed: int, is_loop: bool = False) -> AliasedStep:
    """Return the function of a seed; its calls are mostly alike if they are a loop's."""
    draw = random.Random(seed)
    lines = _lines(draw)
    named = [base for base in BASES if re.search(rf"\b{base[:4].split('.')[0]}", " ".join(lines))]
    bases = named if named and draw.random() < 0.8 else BASES
    kinds = [_arguments(draw, bases)]
    for _ in range(draw.randrange(1, 4)):
        kinds.append(_another(draw, kinds[0], bases))
    parts = {
        "parameter": draw.choice(["fresh(6, 4, 6)", "fresh(6, 4, 6)", "flat[24:].view(4, 6)"]),
        "value": draw.choice(["fresh(8, 4, 6)", "flat[:24].view(4, 6)", "w.detach()"]),
        "part": draw.choice(["fresh(7, 4, 6)", "w", "cache['k'][:2]", "w[:, 1]"]),
        "momentum": draw.choice(["", ", momentum=0.5"]),
        "lines": _indented(lines, 8),
        "kinds": _indented([part for n, one in enumerate(kinds) for part in _lines_of(n, one)], 8),
        "order": _order_of_loop(seed, len(kinds)) if is_loop else _order(draw, len(kinds)),
        "between": _indented(["pass", *_between(draw)], 8),
    }
    unnamed = TEMPLATE.format(named="()", **parts)
    if draw.random() < 0.75:
        return AliasedStep(unnamed, None)
    name = draw.choice(sorted(set(re.findall(r"\.([a-z_]+)", " ".join(lines)))))
    return AliasedStep(TEMPLATE.format(named=f"{name}=n", **parts), unnamed)


def _indented(lines: list[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)


def _lines(draw: random.Random) -> list[str]:
    """The function's own."""
    before, after = [], []
    if draw.random() < 0.6:
        for line in draw.sample([*WRITES, *OF_ARGUMENTS], draw.randrange(1, 4)):
            (before if draw.random() < 0.7 else after).append(f"with torch.no_grad(): {line}")
    gradients: list[str] = []
    if draw.random() < 0.4:
        gradients += draw.choice(
            [["p.grad = None"], [], ["optimizer.zero_grad(set_to_none=False)"]]
        )
        gradients += [draw.choice(GRADIENTS), "loss.backward()"]
        gradients += draw.choice([[], ["optimizer.step()"]])
    reads = draw.sample(READS, draw.randrange(2, 6))
    return [*before, *reads, *gradients, *after, f"return {draw.choice(ENDS)}"]


def _between(draw: random.Random) -> list[str]:
    return draw.sample(BETWEEN, draw.choice([0, 0, 1, 2]))


Argument = tuple[str, str, int]  # text, base, offset


def _arguments(draw: random.Random, bases: list[str]) -> list[Argument]:
    """Of one kind of call; often all but one are tensors of their own, or all."""
    made = [_argument(draw, place, bases) for place in range(4)]
    if draw.random() < 0.6:
        odd = draw.randrange(6)
        made = [one if place == odd else (FRESH[0], "", 0) for place, one in enumerate(made)]
    return made


def _argument(draw: random.Random, place: int, bases: list[str]) -> Argument:
    sources = [VIEWS, VIEWS, VIEWS, FRESH, OTHERS, *([THE_SAME] if place else [])]
    return draw.choice(draw.choice(sources)), draw.choice(bases), draw.randrange(3)


def _another(draw: random.Random, arguments: list[Argument], bases: list[str]) -> list[Argument]:
    """Of these, one or two are others: of another offset or base, tensors of their own, or all else."""
    made = list(arguments)
    odd = [place for place in range(4) if made[place][0] != FRESH[0]]
    if not odd or draw.random() < 0.3:  # those that were two tensors are one, or the reverse
        place = draw.randrange(1, 4)
        made[place] = (FRESH[0] if made[place][0] == "a" else "a", "", 0)
        return made
    for place in sorted({draw.choice(odd), draw.choice(odd)}):
        text, base, offset = made[place]
        made[place] = draw.choice([
            (text, base, (offset + 1) % 3),
            (text, base, (offset + 1) % 3),
            (text, draw.choice(bases), offset),
            (f"({text}).detach().clone()", base, offset),
            _argument(draw, place, bases),
        ])  # fmt: skip
    return made


def _lines_of(number: int, arguments: list[tuple[str, str, int]]) -> list[str]:
    """What gives the arguments of one kind of call."""
    lines = [
        f"    {name} = {text.format(b=base, k=offset)}"
        for name, (text, base, offset) in zip("abcd", arguments)
    ]
    return [f"if kind == {number}:", *lines, "    return a, b, c, d"]


def _order(draw: random.Random, kinds: int) -> list[int]:
    """Of the calls' kinds: three of the first, then each a few times."""
    order = [0, 0, 0]
    while len(order) < CALLS:
        order += [draw.randrange(kinds)] * draw.choice([1, 1, 2, 3])
    return order[:CALLS]


def _order_of_loop(seed: int, kinds: int) -> list[int]:
    """Of the calls' kinds: ten of the first, then each a while."""
    draw = random.Random(seed)
    order = [0] * 10
    while len(order) < LOOP_CALLS:
        order += [draw.randrange(kinds)] * draw.choice([1, 2, 5, 8])
    return order[:LOOP_CALLS]


# --- judging ------------------------------------------------------------------------------------


def judged(seed: int, tier: str) -> tuple[str, dict[str, int]]:
    """Where the function of that seed is not what it is on the CPU, "" where nowhere is; counts."""
    step = aliased_step(seed)
    with warnings.catch_warnings(), config.override(LTC_CHECK=0, LTC_TIER=tier):
        warnings.simplefilter("ignore")  # what is refused is counted
        expected = list(_results(step, lambda function: function, "cpu"))
        with metrics.counted() as grown:
            fault = _fault(step, expected)
        plain = step.without_names()
        if plain is not None and not fault:
            with metrics.counted() as others:
                _fault(plain, expected)
            if (
                2 * grown["ReplayedCalls"] < others["ReplayedCalls"]
            ):  # which may differ by a recording
                fault = (
                    f"{grown['ReplayedCalls']} calls are replayed, and {others['ReplayedCalls']} "
                    f"where no global has an attribute's name"
                )
    return fault, dict(grown)


def judged_loop(seed: int) -> tuple[str, dict[str, int]]:
    """Where a loop of calls that nothing replays is not what it is on the CPU; counts.

    What lives is looked at behind some calls; behind others there is a mark, or nothing.
    """
    step, draw = aliased_step(seed, is_loop=True), random.Random(seed)
    behind = [draw.choice(["read", "mark", "mark", "mark", ""]) for _ in range(LOOP_CALLS)]
    behind[-1] = "read"
    with warnings.catch_warnings(), config.override(LTC_CHECK=0, LTC_TIER="auto"):
        warnings.simplefilter("ignore")
        expected = _looped(step, "cpu", behind)
        with metrics.counted() as grown:
            found = _looped(step, "ltc", behind)
    for (number, values), (_, others) in zip(found, expected):
        for place, (one, other) in enumerate(zip(values, others, strict=True)):
            if not _is_close(one, other):
                return f"call {number}: tensor {place} is {one} instead of {other}", dict(grown)
    same = [number for number, _ in found] == [number for number, _ in expected]
    return "" if same else "an error of the CPU's did not come, or another one did", dict(grown)


def _looped(step: AliasedStep, device: str, behind: list[str]) -> list[tuple[int, list[Any]]]:
    """What is looked at behind each such call, until one raises."""
    call, found = step.make(lambda function: function, device), []
    for number, then in enumerate(behind):
        try:
            made = call(number)
        except (RuntimeError, IndexError):
            break
        if then == "read":
            found.append(
                (number, [None if one is None else one.detach().cpu().clone() for one in made])
            )
        elif then == "mark" and device != "cpu":
            ltm.mark_step()
        if device != "cpu":
            compile_behind.wait()
    return found


def _results(step: AliasedStep, compiled: Callable, device: str) -> Any:
    """Of each call until one raises: on the CPU such a program is not one."""
    call = step.make(compiled, device)
    for number in range(CALLS):
        try:
            found = call(number)
        except (RuntimeError, IndexError):
            return
        yield [None if one is None else one.detach().cpu().clone() for one in found]


def _fault(step: AliasedStep, expected: list[list[Any]]) -> str:
    call = step.make(ltc.compile, "ltc")
    for number, values in enumerate(expected):
        try:
            found = [None if one is None else one.detach().cpu().clone() for one in call(number)]
        except Exception as error:
            *_, at = traceback.extract_tb(error.__traceback__)
            return (
                f"call {number} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})"
            )
        for place, (one, other) in enumerate(zip(found, values, strict=True)):
            if not _is_close(one, other):
                return f"call {number}: tensor {place} is {one} instead of {other}"
    return ""


def _is_close(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one, other, equal_nan=True, **CLOSE)
