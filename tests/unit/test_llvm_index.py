"""Index arithmetic: what its operators write, what they leave out, and what they refuse."""

import pytest

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.index import least, most


def written(formula) -> list[str]:
    """The instructions of a formula of two arguments of a kernel."""
    builder = Builder()
    formula(builder.number(0), builder.number(1))
    return [line.partition(" = ")[2] for line in builder.body().splitlines()]


def test_a_formula_is_the_instructions_that_it_reads_as():
    assert written(lambda x, y: (x * 3 + y) * 5 - 2) == [
        "mul i64 %n0, 3", "add i64 %v1, %n1", "mul i64 %v2, 5", "sub i64 %v3, 2",
    ]  # fmt: skip
    assert written(lambda x, y: 7 - 2 * x + (1 + y)) == [
        "mul i64 2, %n0", "sub i64 7, %v1", "add i64 1, %n1", "add i64 %v2, %v3",
    ]  # fmt: skip


def test_least_and_most_compare_with_a_sign():
    assert written(least) == ["icmp slt i64 %n0, %n1", "select i1 %v1, i64 %n0, i64 %n1"]
    assert written(lambda x, _: most(0, x)) == [
        "icmp sgt i64 0, %n0",
        "select i1 %v1, i64 0, i64 %n0",
    ]
    assert (least(3, 4), most(3, 4)) == (3, 4)


@pytest.mark.parametrize("formula, result", [
    (lambda x: x + 0, "%n0"), (lambda x: 0 + x, "%n0"), (lambda x: x - 0, "%n0"),
    (lambda x: x * 1, "%n0"), (lambda x: 1 * x, "%n0"), (lambda x: x // 1, "%n0"),
    (lambda x: x * 0, 0), (lambda x: 0 * x, 0), (lambda x: x % 1, 0),
    (lambda x: divmod(x, 1), ("%n0", 0)),
])  # fmt: skip
def test_nothing_is_written_where_one_operand_decides_the_result(formula, result):
    builder = Builder()
    assert formula(builder.number(0)) == result
    assert builder.body() == ""


REFUSED = [
    lambda x, name: x + name, lambda x, name: name + x, lambda x, name: x - name,
    lambda x, name: name - x, lambda x, name: x * name, lambda x, name: name * x,
    lambda x, name: x // name, lambda x, name: x % name, lambda x, name: name % x,
    lambda x, name: divmod(x, name), lambda x, name: least(x, name), lambda x, name: x < name,
]  # fmt: skip


@pytest.mark.parametrize("formula", REFUSED)
def test_a_name_that_is_no_index_is_refused_and_not_joined(formula):
    builder = Builder()
    for name in ("%p0", builder.value("fadd float 1.0, 2.0"), 1.5):
        with pytest.raises(TypeError):
            formula(builder.number(0), name)


def test_a_value_that_is_no_index_is_refused_without_any_other_one():
    value = Builder().value("fadd float 1.0, 2.0")
    for formula in (lambda: value + value, lambda: value * 2, lambda: "%p0" + value):
        with pytest.raises(TypeError, match="index"):
            formula()


def test_what_a_loop_hands_on_is_an_index_where_it_is_of_i64():
    builder = Builder()
    end, total = builder.loop(
        0, builder.number(0), 1, [("i64", "0"), ("float", "0.0")],
        lambda i, carried: [carried[0] + i, carried[1]],
    )  # fmt: skip
    assert end + 1 == "%v7"
    with pytest.raises(TypeError, match="index"):
        total + 1


def test_a_nest_is_the_loops_that_it_stands_for():
    nest, loops = Builder(), Builder()
    start = [("i64", "0")]
    nest.nest((3, (2, nest.number(0), 4)), start, lambda i, j, sums: [sums[0] + i * 5 + j])
    loops.loop(0, 3, 1, start, lambda i, sums: loops.loop(
        2, loops.number(0), 4, [("i64", sums[0])], lambda j, sums: [sums[0] + i * 5 + j]
    ))  # fmt: skip
    assert nest.body() == loops.body()
