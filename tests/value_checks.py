"""The checks of values that PyTorch's kernels for the CPU make: each a small program, what it takes, what it refuses.

The table is what tests/system/test_value_checks.py tries on every tier, what docs/api.md lists, and
what scripts/compare/value_checks.py draws from.
"""

from __future__ import annotations

import functools
import math
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import ltc.core.lazy_model as ltm
from ltc import config

# Of these calls the CPU's words depend on which of its kernels finds what is wrong.
OTHER_WORDS = ("`embedding`, `embedding_bag`",)
NAN, INF = math.nan, math.inf
Place = Callable[[torch.Tensor], torch.Tensor]  # puts a CPU tensor on the device


@dataclass(frozen=True)
class ValueCheck:
    """One check.

    call    as the docs name it
    run     is given what puts tensors on the device, and the values; gives what it computed
    right   values that are taken, the last ones at the limit
    wrong   values that are refused
    dtype   of the values
    """

    call: str
    run: Callable[[Place, torch.Tensor], torch.Tensor]
    right: tuple[Any, ...]
    wrong: tuple[Any, ...]
    dtype: torch.dtype = torch.float32

    def values(self, chosen: Any) -> torch.Tensor:
        return torch.tensor(chosen, dtype=self.dtype)


CHECKS: dict[str, ValueCheck] = {}
_FRACTIONS = (0.25, 0.5, 0.75, 0.0, -0.0, 1.0, 5e-324)
_NO_FRACTIONS = (1.0000001, -1e-30, 2.0, -1.0, NAN, INF, -INF)


def _row(name: str, call: str, right: Any, wrong: Any, **named: Any) -> Callable:
    def keep(run: Callable[[Place, torch.Tensor], torch.Tensor]) -> Callable:
        CHECKS[name] = ValueCheck(call, run, tuple(right), tuple(wrong), **named)
        return run

    return keep


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


# --- probabilities -------------------------------------------------------------------------------


@_row("bce", "`binary_cross_entropy`", _FRACTIONS, _NO_FRACTIONS)
def _(place: Place, p: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy(place(p), place(torch.full_like(p, 0.5)))


@_row("bce target", "`binary_cross_entropy`", _FRACTIONS, _NO_FRACTIONS)
def _(place: Place, p: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy(place(torch.full_like(p, 0.5)), place(p), reduction="sum")


@_row("bce behind a layer", "`binary_cross_entropy`", _FRACTIONS, _NO_FRACTIONS)
def _(place: Place, p: torch.Tensor) -> torch.Tensor:
    weight = _leaf(place(torch.eye(2)))
    x = place(torch.stack([p, torch.full_like(p, 0.5)], 1)) @ weight.t()
    F.binary_cross_entropy(x[:, 0], place(torch.ones_like(p)), reduction="none").mean().backward()
    return weight.grad


@_row("bce gradient", "`binary_cross_entropy`", _FRACTIONS, _NO_FRACTIONS)
def _(place: Place, p: torch.Tensor) -> torch.Tensor:
    x = _leaf(place(p))
    loss = F.binary_cross_entropy(x, place(torch.ones_like(p)))
    loss.backward(place(torch.ones(())))  # nothing needs the loss itself
    return x.grad


@_row("bernoulli", "`bernoulli`", _FRACTIONS, _NO_FRACTIONS)
def _(place: Place, p: torch.Tensor) -> torch.Tensor:
    return torch.bernoulli(place(p)) * 0


@_row("bernoulli_", "`bernoulli`", _FRACTIONS, _NO_FRACTIONS, dtype=torch.float64)
def _(place: Place, p: torch.Tensor) -> torch.Tensor:
    return place(torch.zeros(len(p), dtype=torch.int64)).bernoulli_(place(p)) * 0


@_row("multinomial", "`multinomial`", (1.0, 2.0, 0.5), (-1.0, NAN, INF))
def _(place: Place, p: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(place(p), 1) * 0


@_row("poisson", "`poisson`", (1.0, 0.0, -0.0), (-1.0, -INF))
def _(place: Place, rate: torch.Tensor) -> torch.Tensor:
    return torch.poisson(place(rate)) * 0


@_row("normal", "`normal` by tensors", (1.0, 0.5, 0.0, -0.0, 1e30), (-1.0, -1e-30, NAN, -INF))
def _(place: Place, std: torch.Tensor) -> torch.Tensor:
    return torch.normal(0.0, place(std)) * 0


@_row("normal around", "`normal` by tensors", (1.0, 0.0, -0.0), (-1.0, NAN))
def _(place: Place, std: torch.Tensor) -> torch.Tensor:
    return torch.normal(place(torch.zeros(3, 1)), place(std)) * 0


@_row("quantile", "`quantile`, `nanquantile`", _FRACTIONS, _NO_FRACTIONS)
def _(place: Place, q: torch.Tensor) -> torch.Tensor:
    return torch.quantile(place(torch.arange(5.0)), place(q))


@_row("nanquantile", "`quantile`, `nanquantile`", _FRACTIONS, _NO_FRACTIONS)
def _(place: Place, q: torch.Tensor) -> torch.Tensor:
    return torch.nanquantile(place(torch.tensor([3.0, NAN, 1.0])), place(q))


@_row("quantile gradient", "`quantile`, `nanquantile`", _FRACTIONS, _NO_FRACTIONS)
def _(place: Place, q: torch.Tensor) -> torch.Tensor:
    x, q = _leaf(place(torch.arange(5.0))), _leaf(place(q))
    torch.quantile(x, q).sum().backward()
    return x.grad


# --- classes and indices -------------------------------------------------------------------------

_ROWS = 5
_INSIDE, _OUTSIDE = (1, 3, 0, _ROWS - 1), (_ROWS, -1, 10**6, -(10**6))
_WRAPPED, _UNWRAPPED = (*_INSIDE, -1, -_ROWS), (_ROWS, -_ROWS - 1, 10**6)
_index = functools.partial(_row, dtype=torch.int64)


@_index("one_hot", "`one_hot`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return F.one_hot(place(index), _ROWS)


@_index("one_hot of any", "`one_hot`", _INSIDE, (-1, -(10**6)))
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return F.one_hot(place(index))


@_index("cross_entropy", "`nll_loss`, `cross_entropy`", (*_INSIDE, -100), (_ROWS, -1, 10**6))
def _(place: Place, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(place(torch.ones(len(target), _ROWS)), place(target), reduction="sum")


@_index("nll_loss gradient", "`nll_loss`, `cross_entropy`", (*_INSIDE, -100), (_ROWS, -1))
def _(place: Place, target: torch.Tensor) -> torch.Tensor:
    x = _leaf(place(torch.ones(len(target), _ROWS)))
    F.nll_loss(x, place(target), reduction="sum").backward(place(torch.ones(())))
    return x.grad


@_index("multi_margin_loss", "`multi_margin_loss`, `multilabel_margin_loss`", _INSIDE, _OUTSIDE)
def _(place: Place, target: torch.Tensor) -> torch.Tensor:
    x = place(torch.ones(len(target), _ROWS))
    return F.multi_margin_loss(
        x, place(target), reduction="none"
    )  # of nothing, the mean is garbage


@_index(
    "multilabel_margin_loss",
    "`multi_margin_loss`, `multilabel_margin_loss`",
    (*_INSIDE, -1),
    (_ROWS, -2, 10**6),
)
def _(place: Place, target: torch.Tensor) -> torch.Tensor:
    labels = F.pad(target[:, None], (0, _ROWS - 1), value=-1)
    return F.multilabel_margin_loss(
        place(torch.ones(labels.shape)), place(labels), reduction="none"
    )


@_index("embedding", "`embedding`, `embedding_bag`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return F.embedding(place(index), place(torch.ones(_ROWS, 2)))


@_index("embedding gradient", "`embedding`, `embedding_bag`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    table = _leaf(place(torch.ones(_ROWS, 2)))
    F.embedding(place(index), table).backward(place(torch.ones(len(index), 2)))
    return table.grad


@_index("embedding by frequency", "`embedding`, `embedding_bag`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    table = _leaf(place(torch.ones(_ROWS, 2)))
    rows = F.embedding(place(index), table, scale_grad_by_freq=True)
    rows.backward(place(torch.ones(len(index), 2)))
    return table.grad


@_index("embedding_bag", "`embedding`, `embedding_bag`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    offsets = place(torch.zeros(min(1, len(index)), dtype=torch.int64))
    return F.embedding_bag(place(index), place(torch.ones(_ROWS, 2)), offsets)


@_index("embedding_bag by frequency", "`embedding`, `embedding_bag`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    table = _leaf(place(torch.ones(_ROWS, 2)))
    bags = place(torch.arange(len(index)))
    sums = F.embedding_bag(place(index), table, bags, scale_grad_by_freq=True)
    sums.backward(place(torch.ones(len(index), 2)))
    return table.grad


@_index("gather", "`gather`, `take`, `index_select`, `x[i]`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return place(torch.arange(5.0)).gather(0, place(index))


@_index("take", "`gather`, `take`, `index_select`, `x[i]`", _WRAPPED, _UNWRAPPED)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return place(torch.arange(5.0)).take(place(index))


@_index("index_select", "`gather`, `take`, `index_select`, `x[i]`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return place(torch.arange(5.0)).index_select(0, place(index))


@_index("index", "`gather`, `take`, `index_select`, `x[i]`", _WRAPPED, _UNWRAPPED)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return place(torch.arange(5.0))[place(index)]


@_index("scatter", "`scatter`, `put`, `index_add`, `index_copy`, `x[i] = y`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return place(torch.zeros(5)).scatter(0, place(index), 1.0)


@_index("scatter_add", "`scatter`, `put`, `index_add`, `index_copy`, `x[i] = y`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return place(torch.zeros(5)).scatter_add(0, place(index), place(torch.ones(len(index))))


@_index("put", "`scatter`, `put`, `index_add`, `index_copy`, `x[i] = y`", _WRAPPED, _UNWRAPPED)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return place(torch.zeros(5)).put(place(index), place(torch.ones(len(index))))


@_index("index_add", "`scatter`, `put`, `index_add`, `index_copy`, `x[i] = y`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return place(torch.zeros(5)).index_add(0, place(index), place(torch.ones(len(index))))


@_index("index_copy", "`scatter`, `put`, `index_add`, `index_copy`, `x[i] = y`", _INSIDE, _OUTSIDE)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    return place(torch.zeros(5, 2)).index_copy(0, place(index), place(torch.ones(len(index), 2)))


@_index(
    "index_put", "`scatter`, `put`, `index_add`, `index_copy`, `x[i] = y`", _WRAPPED, _UNWRAPPED
)
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    x = place(torch.zeros(5))
    x[place(index)] = 1.0
    return x


@_index("max_unpool", "`max_unpool1d` to `max_unpool3d`", (1, 3, 0, 4), (5, -1, 10**6))
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(len(index), 1, 1)
    return F.max_unpool1d(place(ones), place(index.reshape(-1, 1, 1)), 5)


@_index("searchsorted", "`searchsorted`: sorter", (0, 1, 2), (3, -1, 10**6))
def _(place: Place, index: torch.Tensor) -> torch.Tensor:
    table = place(torch.ones(len(index), 3))
    sorter = place(index[:, None].expand(len(index), 3).contiguous())
    return torch.searchsorted(table, place(torch.ones(len(index), 1)), sorter=sorter)


@_index("bincount", "`bincount`", (1, 0, 4), (-1, -(10**6)))
def _(place: Place, x: torch.Tensor) -> torch.Tensor:
    return torch.bincount(place(x), minlength=5)


@_index("repeat_interleave", "`repeat_interleave`", (1, 2, 0), (-1, -7))
def _(place: Place, repeats: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(place(torch.ones(len(repeats))), place(repeats))


@_index("segment_reduce", "`segment_reduce`: lengths", (2,), (-1, 3, 1))
def _(place: Place, lengths: torch.Tensor) -> torch.Tensor:
    return torch.segment_reduce(place(torch.ones(2 * len(lengths))), "sum", lengths=place(lengths))


@_row(
    "fake quantization",
    "`fake_quantize_per_channel_affine`: zero points",
    (3, 0, 255),
    (256, -1, 10**6),
    dtype=torch.int32,
)
def _(place: Place, zero: torch.Tensor) -> torch.Tensor:
    scale, x = torch.full((len(zero),), 0.1), torch.ones(len(zero), 2)
    return torch.fake_quantize_per_channel_affine(place(x), place(scale), place(zero), 0, 0, 255)


# --- numbers -------------------------------------------------------------------------------------

_DIVISIONS = {
    "floor division": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "division that truncates": functools.partial(torch.div, rounding_mode="trunc"),
}


def _divided(divide: Callable, place: Place, divisor: torch.Tensor) -> torch.Tensor:
    return divide(place(torch.full_like(divisor, 7)), place(divisor))


for _name, _divide in _DIVISIONS.items():
    _index(_name, "integers divided by zero", (1, 3, -1, 2), (0,))(
        functools.partial(_divided, _divide)
    )


@_row("histc", "`histc`, `histogram`", (0.25, 1.0, -0.0), (INF, NAN))
def _(place: Place, x: torch.Tensor) -> torch.Tensor:
    return torch.histc(place(x), 4)


@_row("assert_async", "`torch._assert_async`", (1.0, -1.0), (0.0, -0.0))
def _(place: Place, x: torch.Tensor) -> torch.Tensor:
    torch._assert_async(place(x.prod()))
    return place(x)


# --- matrices ------------------------------------------------------------------------------------


def _diagonal(x: torch.Tensor) -> torch.Tensor:
    return torch.diag_embed(torch.stack([x, torch.ones_like(x)], -1))


_matrix = functools.partial(_row, dtype=torch.float64)


@_matrix("inv", "`linalg.inv`, `solve`, `cholesky`, `lu_factor`, `eigh`, …", (1.0, -2.0), (0.0,))
def _(place: Place, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(place(_diagonal(x)))


@_matrix("solve", "`linalg.inv`, `solve`, `cholesky`, `lu_factor`, `eigh`, …", (1.0, -2.0), (0.0,))
def _(place: Place, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(place(_diagonal(x)), place(torch.ones(len(x), 2, 1).double()))


@_matrix(
    "cholesky", "`linalg.inv`, `solve`, `cholesky`, `lu_factor`, `eigh`, …", (1.0, 2.0), (0.0, -1.0)
)
def _(place: Place, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(place(_diagonal(x)))


def table() -> str:
    """What the docs show: of each call the CPU's error for a wrong value."""
    rows: dict[str, str] = {}
    for check in CHECKS.values():
        values = check.values([check.right[0], check.wrong[0]])
        error = outcome(check, values, lambda x: x)
        text = str(error).partition("  (Could")[0]
        rows.setdefault(check.call, f"{type(error).__name__.lstrip('_')}: {text}")
    return "\n".join(f"| {call} | {error} |" for call, error in rows.items())


# --- random programs -----------------------------------------------------------------------------


def drawn(check: ValueCheck, choose: random.Random, size: int) -> torch.Tensor:
    """Values of which, in every other program, some are wrong."""
    values = [choose.choice(check.right) for _ in range(size)]
    if size and choose.random() < 0.5:
        for _ in range(choose.choice((1, 1, 2))):
            values[choose.randrange(size)] = choose.choice(check.wrong)
    return check.values(values)


def outcome(check: ValueCheck, values: torch.Tensor, place: Place) -> torch.Tensor | Exception:
    """What the program gives, or the error that it raises: by its own mark, or by the read."""
    try:
        made = check.run(place, values)
        if made.device.type != "cpu":
            ltm.mark_step(wait=True)
        return made.detach().cpu()
    except Exception as error:
        return error


def difference(
    check: ValueCheck, expected: torch.Tensor | Exception, found: torch.Tensor | Exception
) -> str | None:
    """In which way what was found is not what the CPU gives or raises; None where it is."""
    if isinstance(expected, torch.Tensor):
        try:
            torch.testing.assert_close(found, expected, equal_nan=True)
        except (AssertionError, TypeError) as error:
            return f"{found!r}: {error}"
        return None
    if not isinstance(found, type(expected)):
        return f"{found!r}, and the CPU raises {expected!r}"
    own_lines = str(found).removeprefix(
        str(expected)
    )  # an index and a size that the CPU leaves out
    if own_lines[:1] not in ("", "\n") and check.call not in OTHER_WORDS:
        return f"the text {found!r}, and the CPU's is {expected!r}"
    frames = traceback.format_tb(found.__traceback__)  # the program's own where it raises at once
    told = [*frames, *getattr(found, "__notes__", ())]
    return None if Path(__file__).name in " ".join(told) else f"{found!r} without the line"


_LAID_OUT: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x,
    lambda x: x,
    lambda x: torch.cat([x, x])[: len(x)],
    lambda x: torch.stack([x, x], -1).select(-1, 1),
    lambda x: x.clone(),
)


def failure_of(seed: int) -> str | None:
    """What is wrong with a random program: a call, some sizes, values in and outside its range, a tier."""
    choose = random.Random(seed)
    name = choose.choice(list(CHECKS))
    check, tier = CHECKS[name], choose.choice(("auto", "auto", "native", "op_by_op"))
    of_vectors = choose.choice(_LAID_OUT)

    def laid_out(x: torch.Tensor) -> torch.Tensor:
        return of_vectors(x) if x.dim() else x

    sizes = choose.choices((0, 1, 2, 3, 5, 17, 40), k=choose.randint(1, 2))
    with config.override(LTC_TIER=tier, LTC_NUM_DEVICES=1):
        for number in range(choose.choice((1, 3, 6))):
            values = drawn(check, choose, choose.choice(sizes))
            expected = outcome(check, values, laid_out)
            found = outcome(check, values, lambda x: laid_out(x.to("ltc")))
            wrong = difference(check, expected, found)
            if wrong is not None:
                return f"{name}, {tier}, run {number + 1}, of {values.tolist()}: {wrong}"
    return None
