"""Generated attention kernels against torch's fused attention, forward and backward.

python scripts/bench/attention_bench.py [--only PART_OF_A_NAME] [--threads 1 2]

Each row: microseconds of both, and how many times faster ltc's kernels are.  The programs alone:
nothing is recorded, and torch's backward is timed without its forward.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from kernel_bench import ISA, arguments_of, medians, program

from ltc.llvm.attention.backward import attention_gradient
from ltc.llvm.attention.forward import attention_kernel
from ltc.llvm.attention.scores import Attention
from ltc.llvm.gemm.blocking import Matrix, stored_plain


class Case(NamedTuple):
    """[batch, heads, queries, extent] by keys of the same; `mask` is none, padding or full."""

    batch: int
    heads: int
    queries: int
    keys: int
    extent: int
    causal: bool = False
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    mask: str = "none"

    @property
    def name(self) -> str:
        b, h, n, s, e = self[:5]
        parts = [f"{b}x{h}x{n}x{s}x{e}", str(self.dtype)[6:], "causal" * self.causal]
        parts.append("dropout" * bool(self.dropout))
        parts.append(f"{self.mask} mask" if self.mask != "none" else "")
        return " ".join(filter(None, parts))


CASES = (
    Case(8, 4, 128, 128, 64), Case(8, 4, 128, 128, 64, True),
    Case(2, 12, 1024, 1024, 64), Case(2, 12, 1024, 1024, 64, True),
    Case(1, 1, 2048, 2048, 64, True), Case(8, 8, 197, 197, 48), Case(16, 8, 65, 65, 32),
    Case(4, 12, 1, 512, 64), Case(8, 4, 128, 128, 64, dropout=0.1),
    Case(8, 4, 128, 128, 64, mask="padding"), Case(8, 4, 128, 128, 64, mask="full"),
    Case(8, 4, 128, 128, 64, dtype=torch.bfloat16), Case(8, 4, 128, 128, 64, dtype=torch.float64),
)  # fmt: skip


def ways_of(case: Case) -> dict[str, dict]:
    """For each pass, ltc's program and torch's call."""
    b, h, n, s, e = case[:5]
    plain = functools.partial(stored_plain, batch=(b, h))
    query, key, value, gradient = (torch.randn(b, h, k, e).to(case.dtype) for k in (n, s, s, n))
    given = {"scale": torch.tensor(1 / math.sqrt(e), dtype=torch.float64)}
    mask, at = None, None
    if case.mask == "padding":
        mask, at = torch.rand(b, 1, 1, s) > 0.2, Matrix(0, 1, (s, 0))
    elif case.mask == "full":
        mask, at = torch.rand(n, s) > 0.2, Matrix(s, 1, (0, 0))
    if mask is not None:
        given["bias"] = mask
    if case.dropout:
        given["seed"] = torch.tensor(7)
        given["probability"] = torch.tensor(case.dropout, dtype=torch.float64)
    attention = Attention(
        case.dtype, (b, h), n, s, e, e, plain(n, e), plain(s, e), plain(s, e), at,
        mask is not None, case.causal, bool(case.dropout),
    )  # fmt: skip
    result, wide = torch.empty_like(query), torch.promote_types(case.dtype, torch.float32)
    given |= {"query": query, "key": key, "value": value, "result": result}
    given["logarithms"] = torch.empty(b, h, n, dtype=wide)
    rows = plain(n, e)
    forward = program(attention_kernel("kernel", attention, rows, ISA), **given)
    forward()
    backward = program(
        attention_gradient(
            "kernel", attention, rows, rows, Matrix(1, 1, (h * n, n)),
            (rows, plain(s, e), plain(s, e)), False, ISA,
        ),
        **given, gradient=gradient, factor=given["scale"], query_gradient=torch.empty_like(query),
        key_gradient=torch.empty_like(key), value_gradient=torch.empty_like(value),
    )  # fmt: skip
    named = {"attn_mask": mask, "is_causal": case.causal, "dropout_p": case.dropout}
    operands = [x.clone().requires_grad_() for x in (query, key, value)]
    theirs = F.scaled_dot_product_attention(*operands, **named)

    def without_gradient():
        with torch.no_grad():
            F.scaled_dot_product_attention(query, key, value, **named)

    return {
        "forward": {"ltc": forward, "torch": without_gradient},
        "backward": {
            "ltc": backward,
            "torch": lambda: torch.autograd.grad(theirs, operands, gradient, retain_graph=True),
        },
    }


def main() -> None:
    arguments = arguments_of(__doc__)
    print("| case | pass | threads | us: ltc | torch | ltc is faster by |")
    print("|---|---|---|---|---|---|")
    for case in (c for c in CASES if arguments.only in c.name):
        for name, ways in ways_of(case).items():
            for count in arguments.threads:
                torch.set_num_threads(count)
                seconds = medians(ways)
                ours, theirs = seconds["ltc"] * 1e6, seconds["torch"] * 1e6
                row = f"{case.name} | {name} | {count} | {ours:.0f} | {theirs:.0f}"
                print(f"| {row} | {theirs / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
