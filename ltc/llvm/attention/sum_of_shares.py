"""The second kernel of a gradient whose matrices are shared out: it adds what the tasks have made."""

from __future__ import annotations

from ltc.llvm.attention.scores import Attention
from ltc.llvm.attention.tiles import Tiles
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import GeneratedKernel, Vectors, tasks_for
from ltc.llvm.gemm.blocking import Matrix


def sum_of_shares(
    name: str, a: Attention, side: str, columns: int, shares: int, target: Matrix, isa: Isa
) -> GeneratedKernel:
    """The sums of the shares of each matrix, one after the other, in the result's dtype."""
    b = Builder()
    t = Tiles(b, isa, a.dtype)
    v: Vectors = t.v
    size = a.keys * columns

    def row(number: Index, _) -> None:
        batch, k = divmod(number, a.keys)
        (offset,) = t.locate(batch, a.batch, {"target": target}).values()
        line = offset + k * target.row
        first = batch * shares * size + k * columns
        for c in range(0, columns, v.width):
            mask = v.first(columns - c)
            total = v.load_computed("%p0", first + c, mask)
            for i in range(1, shares):
                total = v.add(total, v.load_computed("%p0", first + (i * size + c), mask))
            if target.column == 1:
                v.store(total, "%p1", line + c, mask)
            else:
                _scatter(v, total, "%p1", line, c, target.column, min(v.width, columns - c))

    rows = a.batches * a.keys
    b.loop(*b.share(b.number(0)), 1, [], row)
    arguments = (f"{side}_sums", f"{side}_gradient")
    return GeneratedKernel(
        name, function_text(name, 2, b, numbers=1), arguments,
        tasks_for(rows * columns * shares * 8, rows, 1), rows * columns * shares, (rows,),
    )  # fmt: skip


def _scatter(v: Vectors, total: str, pointer: str, line: Index, first: int, step: int, count: int):
    """Numbers `step` apart, one by one."""
    for i in range(count):
        lanes = ", ".join(f"i32 {i if lane == 0 else -1}" for lane in range(v.width))
        lanes = lanes.replace("i32 -1", "i32 poison")
        one = v.builder.value(
            f"shufflevector {v.vector} {total}, {v.vector} poison, <{v.width} x i32> <{lanes}>"
        )
        v.store(one, pointer, line + (first + i) * step, v.first(1))
