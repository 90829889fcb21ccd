"""Rewrites fire where they hold, and nowhere else."""

import pytest
import torch

from ltc import config
from ltc.debug import metrics
from ltc.ir import build, ops
from ltc.ir.graph import Graph, Origin, schedule
from ltc.ir.node import constant, make
from ltc.passes import pipeline


def given(*shape, index=0, dtype=torch.float32):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def simplified(output):
    inputs = tuple(n for n in schedule(output) if n.op is ops.INPUT)
    with config.override(LTC_CHECK="1"):
        (result,) = pipeline.run(Graph(inputs, (), (output,))).outputs
    return result


x = given(4, 6)
i = given(4, 6, index=1, dtype=torch.int64)
b = given(4, 6, index=2, dtype=torch.bool)
rows = build.exp(given(2, 6, index=4))


@pytest.mark.parametrize(
    "before, after",
    [
        (x * 1, x),
        (1 * x, x),
        (x / 1, x),
        (x - 0, x),
        (i + 0, i),
        (-(-x), x),
        (~~b, b),
        (build.where(b, x, x), x),
        (build.cast(build.cast(x, torch.float64), torch.float32), x),
        (build.permute(build.permute(x, (1, 0)), (1, 0)), x),
        (build.reshape(build.reshape(x, (24,)), (4, 6)), x),
        (build.sum_of(build.reshape(x, (4, 1, 6)), [1]), x),
        (build.expand(build.expand(given(6), (1, 6)), (4, 6)), build.expand(given(6), (4, 6))),
        (build.flip(build.flip(x, [1]), [1]), x),
        (build.insert(x, -x, 0, 0), -x),
        (build.slice_dim(build.insert(x, rows, 0, 1), 0, 1, 3), rows),
        (build.insert(build.insert(x, rows, 0, 1), -rows, 0, 1), build.insert(x, -rows, 0, 1)),
    ],
)  # fmt: skip
def test_an_identity_holds(before, after):
    assert simplified(before) is after


def test_slices_compose():
    inner = build.slice_dim(x, 1, 1, 6, 2)  # 1, 3, 5
    outer = build.slice_dim(inner, 1, 1, 3)  # 3, 5
    (only,) = [n for n in schedule(simplified(outer)) if n.op is ops.SLICE]
    assert only.attr("starts") == (0, 3) and only.attr("steps") == (1, 2)
    assert only.shape == (4, 2)


@pytest.mark.parametrize(
    "kept",
    [
        x + 0,  # -0.0 + 0 is 0.0
        x * 0,  # NaN, infinity, -0.0
        x - x,
        x / x,
        build.exp(build.log(x)),
        x - constant(-0.0, torch.float32),
        given(6, index=3) * build.full((4, 6), 1, torch.float32),  # it has another shape
        build.cast(build.cast(x, torch.float16), torch.float32),
        build.cast(build.cast(i, torch.float32), torch.int64),
    ],
)
def test_what_changes_a_bit_is_kept(kept):
    assert simplified(kept) is kept


def test_a_barrier_is_never_looked_through():
    fenced = make(ops.BARRIER, -x, position=1)
    assert simplified(-fenced) is -fenced
    assert make(ops.BARRIER, x, position=1) is not make(ops.BARRIER, x, position=2)


def test_a_rule_that_fires_is_counted_and_the_line_survives():
    node = build.exp(x) * 1
    graph = Graph((x,), (), (node,), {node: Origin("aten::mul.Tensor", "train.py:3 in step")})
    with metrics.counted() as grown:
        result = pipeline.run(graph)
    assert grown["rule.times_one"] == 1
    assert result.lines[build.exp(x)] == "train.py:3 in step"


def test_a_dumped_pass_prints_its_graph(capsys):
    with config.override(LTC_DUMP="simplify"):
        pipeline.run(Graph((x,), (), (x * 1 + 2,)))
    assert capsys.readouterr().out.startswith("# after simplify: ")


def test_a_deep_graph_is_rewritten():
    deep = x
    for _ in range(50_000):
        deep = build.exp(deep * 1)
    assert len(schedule(simplified(deep))) == 50_001
