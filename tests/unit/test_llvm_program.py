"""Programs: in which order their steps run, what they write over, and how a failing kernel ends."""

import pytest
import torch

from ltc.backends.eager import EagerBackend
from ltc.backends.llvm import schedule
from ltc.backends.llvm.backend import LlvmBackend
from ltc.backends.llvm.executable import LlvmComputation
from ltc.backends.llvm.liveness import Lifetimes
from ltc.backends.llvm.plan import plan_of
from ltc.backends.llvm.schedule import form_of
from ltc.ir import build, ops
from ltc.ir.graph import Graph, Origin
from ltc.ir.node import Node, make
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.loops.emitter import kernel_code
from ltc.llvm.native.kernel_run import EntryCall, Fault, KernelRun, entry_address
from ltc.passes.fusion.fuse import fuse


def given(*shape, index=0, dtype=torch.float32) -> Node:
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def graph_of(*outputs: Node, inputs=(), scalars=()) -> Graph:
    return Graph(tuple(inputs), tuple(scalars), outputs)


def take_with_check(node: Node, error: str, message: str) -> KernelCode:
    """Element index[0] of x; where that is outside: the fault, and nothing is touched."""
    x, index = node.inputs
    b = Builder(width=1)
    at = b.effect("load i64, ptr %p1")
    inside = b.value(f"icmp ult i64 {at}, {x.type.size}")

    def copy() -> None:
        value = b.effect(f"load float, ptr {b.address('%p0', at, 'float')}")
        b.emit(f"store float {value}, ptr %p2")

    b.when(inside, [], copy)
    outside = b.value(f"xor i1 {inside}, true")

    def fail() -> None:
        shifted = b.value(f"shl i64 {at}, 8")
        b.emit(f"store i64 {b.value(f'or i64 {shifted}, 1')}, ptr %p3")

    b.when(outside, [], fail)
    nodes = (x, index, node, Fault(node, error, message))
    return KernelCode(function_text("kernel", 4, b), nodes, 1)


@pytest.fixture
def native_take(monkeypatch):
    """TAKE of one element as a kernel; calling it says what its fault raises."""

    def use(error: str = "", message: str = "") -> None:
        reference = schedule._step

        def step(unit, kernels):
            if isinstance(unit, Node) and unit.op is ops.TAKE:
                code = take_with_check(unit, error, message)
                # a unit that is no Node makes the step native
                return schedule.ProgramStep(code, unit.inputs, (unit,), (code,))
            return reference(unit, kernels)

        in_loops = schedule.is_native
        monkeypatch.setattr(schedule, "_step", step)
        monkeypatch.setattr(
            schedule, "is_native", lambda node: node.op is not ops.TAKE and in_loops(node)
        )

    return use


def compiled(graph: Graph, donated=()) -> LlvmComputation:
    return LlvmBackend().compile(graph, 0, frozenset(donated))


def test_a_kernel_that_finds_no_fault_runs_on(native_take):
    native_take("IndexError", "no")
    x, index = given(3), given(1, index=1, dtype=torch.int64)
    graph = graph_of(build.take(x, index, 0) * 2.0, inputs=[x, index])
    (result,) = compiled(graph).launch([torch.tensor([1.0, 2, 3]), torch.tensor([2])], [])
    assert result.tolist() == [6]


def test_a_fault_raises_its_error_with_the_value_and_the_line(native_take):
    native_take("IndexError", "{value} is no index of 3 elements")
    x, index = given(3), given(1, index=1, dtype=torch.int64)
    taken = build.take(x, index, 0)
    graph = Graph((x, index), (), (taken,), {taken: Origin("aten::take", "user.py:7 in f")})
    computation = compiled(graph)
    for number in (9, -4, 0, 9):  # and the same program runs well in between
        buffers = [torch.arange(3.0), torch.tensor([number])]
        if number == 0:
            assert computation.launch(buffers, [])[0].tolist() == [0]
            continue
        with pytest.raises(IndexError, match=f"^{number} is no index of 3") as raised:
            computation.launch(buffers, [])
        assert raised.value.__notes__ == ["while running aten::take called at user.py:7 in f"]


def test_a_fault_without_a_text_raises_what_the_reference_raises(native_take):
    native_take()
    x, index = given(3), given(1, index=1, dtype=torch.int64)
    graph = graph_of(build.take(x + 1.0, index, 0), inputs=[x, index])
    with pytest.raises(IndexError, match="out of range"):
        compiled(graph).launch([torch.zeros(3), torch.tensor([7])], [])


def test_checks_run_before_inputs_are_written_over(native_take):
    native_take("IndexError", "outside")
    x, index, p = given(3), given(1, index=1, dtype=torch.int64), given(3, index=2)
    graph = graph_of(p + 1.0, build.take(x, index, 0), inputs=[x, index, p])
    parameter = torch.zeros(3)
    computation = compiled(graph, donated=[2])
    with pytest.raises(IndexError) as raised:
        computation.launch([torch.zeros(3), torch.tensor([3]), parameter], [])
    assert raised.value.overwritten == () and parameter.tolist() == [0, 0, 0]
    computation.launch([torch.zeros(3), torch.tensor([1]), parameter], [])
    assert parameter.tolist() == [1, 1, 1]


def test_what_a_later_check_depends_on_is_not_written_over_its_input(native_take):
    native_take("IndexError", "outside")
    p, index, q = given(1), given(1, index=1, dtype=torch.int64), given(1, index=2)
    updated = p + 1.0
    taken = build.take(updated, index, 0)
    graph = graph_of(updated, taken, q + taken, inputs=[p, index, q])
    parameter, other = torch.zeros(1), torch.zeros(1)
    with pytest.raises(IndexError) as raised:
        compiled(graph, donated=[0, 2]).launch([parameter, torch.tensor([5]), other], [])
    assert raised.value.overwritten == ()
    assert parameter.tolist() == [0] and other.tolist() == [0]


def test_an_update_runs_as_soon_as_the_old_value_was_read():
    """Not after everything else: what later steps need not know is free for others."""
    p, x = given(64, 64), given(64, 64, index=1)
    first = make(ops.MATMUL, p, x)
    second = make(ops.MATMUL, make(ops.MATMUL, first, x), x)
    steps = schedule.planned_steps(graph_of(p + first, second, inputs=[p, x]), frozenset([0]))
    update = next(k for k, step in enumerate(steps) if step.overwrites)
    assert update < len(steps) - 1


def test_equal_kernels_are_one_and_all_run_in_one_call():
    x, y = given(50, 30), given(50, 30, index=1)
    plan, texts = plan_of(graph_of(make(ops.EXP, x), make(ops.EXP, y), inputs=[x, y]), frozenset())
    assert len(plan.runs) == 1 and len(texts) <= len(plan.runs[0])


def test_kernels_that_differ_in_their_buffers_alone_are_written_once(monkeypatch):
    """An optimizer has one for each parameter: writing a text takes as long as compiling some."""
    written = []

    def write(kernel, streamed):
        written.append(kernel)
        return kernel_code(kernel, streamed)

    monkeypatch.setattr(schedule, "kernel_code", write)
    inputs = [given(shape, index=k) for k, shape in enumerate((50, 70, 50, 50, 70))]
    outputs = [make(ops.EXP, x) for x in inputs]
    plan, _ = plan_of(graph_of(*outputs, inputs=inputs), frozenset())
    assert (sum(map(len, plan.runs)), len(written)) == (5, 2)


def test_a_kernel_has_the_form_of_those_that_do_the_same_with_other_buffers():
    def form(output, *inputs):
        (unit,) = fuse(graph_of(output, inputs=inputs), schedule.is_native)
        return form_of(unit)

    x, y, z = given(5, 3), given(5, 3, index=1), given(3, 4)
    assert form(x * y, x, y) == form(y * x, x, y)
    assert form(x * y, x, y) != form(x * x, x)
    assert form(x * y, x, y) != form(x + y, x, y)
    assert form(x * 2, x) != form(x * 3, x)
    assert form(x * x, x) != form(z * z, z)
    small = given(5, 3, index=2, dtype=torch.bfloat16)
    assert form(make(ops.EXP, small), small) != form(make(ops.EXP, x), x)


def test_numbers_reach_the_kernel_after_its_pointers():
    b = Builder(width=1)
    total = b.value("add i64 %n0, %n1")
    b.emit(f"store i64 {total}, ptr %p0")
    code = KernelCode(function_text("kernel", 1, b, 2), (None,), 1, numbers=(40, 2))
    frame, result = torch.zeros(6, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    frame[0] = result.data_ptr()
    arguments = (0, 0, 1, 40, 1, 2)  # the word at 1 is 0
    run = KernelRun([EntryCall(entry_address(code.text, code.name), arguments, 1)], 2)
    assert run.launch(frame.data_ptr()) == -1 and result.item() == 42


def test_scalars_of_any_type_arrive_as_torch_would_convert_them():
    cases = [
        (torch.float32, [0.1, 1e300, float("nan"), 3, torch.tensor(2.5)]),
        (torch.float64, [0.1, 7, torch.tensor(1.5, dtype=torch.float64)]),
        (torch.int64, [5, -1, True, 2**62]), (torch.int32, [7]), (torch.bool, [True, False]),
        (torch.bfloat16, [0.1]), (torch.float16, [0.1]),
    ]  # fmt: skip
    for dtype, numbers in cases:
        x = given(4, dtype=dtype)
        cell = make(ops.SCALAR, slot=0, dtype=dtype, wrapped=True)
        computation = compiled(graph_of(build.expand(cell, (4,)), inputs=[x], scalars=[cell]))
        for number in numbers:
            (result,) = computation.launch([torch.zeros(4, dtype=dtype)], [number])
            expected = torch.as_tensor(number, dtype=dtype).expand(4)
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_steps_run_as_recorded_whatever_order_the_outputs_have():
    """A gradient that waits for the end of the step would keep its operands alive till then."""
    x, y = given(64, 64), given(64, 64, index=1)
    first = make(ops.MATMUL, x, y)
    second = make(ops.MATMUL, first, y)
    third = make(ops.MATMUL, second, y)
    origins = {n: Origin("aten::mm", "", k) for k, n in enumerate((first, second, third))}
    side = make(ops.MATMUL, first, x)
    origins[side] = Origin("aten::mm", "", 1)
    graph = Graph((x, y), (), (third, side), origins)
    made = [step.writes[0] for step in schedule.planned_steps(graph, frozenset())]
    assert made.index(side) < made.index(third)


def test_an_update_comes_with_its_gradient_so_that_what_made_that_can_go():
    x, y = given(64, 96), given(64, 96, index=1)
    p, q = given(96, 96, index=2), given(64, 64, index=3)
    first = build.matmul(build.transpose(x, 0, 1), y)
    between = build.matmul(x, build.transpose(y, 0, 1))
    second = build.matmul(between, between)
    new = [p - first, q - second]
    calls = [first, between, second, *new]
    origins = {node: Origin("aten::mm", "", k) for k, node in enumerate(calls)}
    graph = Graph((x, y, p, q), (), tuple(new), origins)
    steps = schedule.planned_steps(graph, frozenset([2, 3]))
    assert [step.writes[0] for step in steps] == [new[0], between, new[1]]
    assert [len(step.overwrites) for step in steps] == [1, 0, 1]


def test_an_update_by_a_sum_comes_as_soon_as_its_operands_are_there():
    x, bias = given(64, 96), given(96, index=1)
    gradient = build.matmul(build.matmul(x, build.transpose(x, 0, 1)), x)
    later = build.matmul(build.transpose(gradient, 0, 1), gradient)
    new = bias - build.sum_of(gradient, 0)
    origins = {node: Origin("aten::mm", "", k) for k, node in enumerate([gradient, later, new])}
    graph = Graph((x, bias), (), (later, new), origins)
    steps = schedule.planned_steps(graph, frozenset([1]))
    assert [step.writes[0] for step in steps][-2:] == [new, later]


def test_what_a_backward_needs_of_an_activation_is_computed_again():
    """gelu's gradient needs five values that one formula makes of its operand: none is stored."""
    x, weight = given(32, 64), given(64, 64, index=1)
    h = make(ops.MATMUL, x, weight)
    t = make(ops.TANH, 0.8 * (h + 0.04 * h * h * h))
    forward = make(ops.MATMUL, 0.5 * h * (1.0 + t), weight)
    slope = 0.5 * (1.0 + t) + 0.4 * h * (1.0 - t * t) * (1.0 + 0.12 * h * h)
    gradient = make(ops.MATMUL, forward, weight)
    backward = make(ops.MATMUL, gradient * slope, weight)
    graph = graph_of(forward, backward, inputs=[x, weight])
    steps = schedule.planned_steps(graph, frozenset())
    stored = {n for step in steps for n in step.writes}
    # of h, the two products' operands, and at most the gradient before it is multiplied
    assert h in stored and t not in stored and len(stored - {forward, backward}) <= 4


def test_a_value_takes_the_place_of_one_that_dies_where_it_is_made():
    x, w = given(64, 64), given(64, 64, index=1)
    h = make(ops.MATMUL, x, w)
    shifted = h - build.max_of(h, (1,), keepdim=True)  # h is read nowhere else
    result = make(ops.MATMUL, shifted, w)
    graph = graph_of(result, inputs=[x, w])
    plan, _ = plan_of(graph, frozenset())
    frame = 8 * (plan.values + plan.arguments) + 64
    assert plan.block < frame + 2 * x.type.size * 4
    operands = torch.randn(64, 64), torch.randn(64, 64)
    (found,) = compiled(graph).launch(list(operands), [])
    (expected,) = EagerBackend().compile(graph, 0, frozenset()).launch(list(operands), [])
    # Two sums of 64 terms in another order, and without fused multiplication where there is none.
    rounding = 2 * 64 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding)


def test_what_is_read_elsewhere_too_keeps_its_place():
    """Rows that are turned, shifted, or read by a later step."""
    x, w = given(64, 64), given(64, 64, index=1)
    for again in (
        lambda h: h + build.transpose(h, 0, 1),
        lambda h: h + build.flip(h, [0]),
        lambda h: make(ops.MATMUL, make(ops.EXP, h), w) + h,
    ):
        h = make(ops.MATMUL, x, w)
        graph = graph_of(make(ops.MATMUL, again(h), w), inputs=[x, w])
        operands = torch.randn(64, 64) / 9, torch.randn(64, 64) / 9
        (found,) = compiled(graph).launch(list(operands), [])
        (expected,) = EagerBackend().compile(graph, 0, frozenset()).launch(list(operands), [])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_activations_lie_in_the_buffers_of_gradients_that_are_made_later(monkeypatch):
    x = given(16, 64)
    weights = [given(64, 64, index=1 + k) for k in range(6)]
    layers = [x]
    for weight in weights:
        layers.append(make(ops.TANH, make(ops.MATMUL, layers[-1], weight)))
    flowing, gradients = layers[-1], []
    for weight, y in zip(reversed(weights), reversed(layers[:-1])):
        gradients.append(make(ops.MATMUL, build.transpose(y, 0, 1), flowing))
        flowing = make(ops.MATMUL, flowing, build.transpose(weight, 0, 1))
    graph = graph_of(*gradients, flowing, inputs=[x, *weights])
    plan, _ = plan_of(graph, frozenset())
    with monkeypatch.context() as patch:
        patch.setattr(Lifetimes, "hosts", lambda self, made: [])
        alone, _ = plan_of(graph, frozenset())
    assert plan.block < alone.block
    operands = [torch.randn(n.shape) / 8 for n in graph.inputs]
    ours = compiled(graph).launch([o.clone() for o in operands], [])
    expected = EagerBackend().compile(graph, 0, frozenset()).launch(operands, [])
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_large_outputs_that_nothing_waits_for_are_made_last_and_lend_their_room():
    """Gradients of wide weights come first in a backward, those of the activations' last."""
    x, narrow, wide = given(8, 4096), given(4096, 4096, index=1), given(600, 1024, index=2)
    kept = make(ops.TANH, x * 2.0)
    small = make(ops.TANH, build.sum_of(make(ops.MATMUL, kept, narrow), (1,), keepdim=True))
    rows = make(ops.TANH, build.expand(small, (8, 1024)) + build.slice_dim(x, 1, 0, 1024))
    gradient = make(ops.MATMUL, build.transpose(rows, 0, 1), rows)
    last = make(
        ops.MATMUL, make(ops.TANH, make(ops.MATMUL, rows, build.transpose(wide, 0, 1))), wide
    )
    end = build.sum_of(kept, (1,)) * build.sum_of(last, (1,))
    graph = graph_of(gradient, end, inputs=[x, narrow, wide])
    steps = schedule.planned_steps(graph, frozenset())
    assert gradient in steps[-1].writes
    plan, _ = plan_of(graph, frozenset())
    assert plan.block < kept.type.size * 4 + 8 * (plan.values + plan.arguments) + 64
    operands = [torch.randn(n.shape) / 64 for n in graph.inputs]
    ours = compiled(graph).launch([o.clone() for o in operands], [])
    expected = EagerBackend().compile(graph, 0, frozenset()).launch(operands, [])
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_others_read_is_not_put_off():
    x = given(8, 1024)
    rows = make(ops.TANH, x)
    gradient = make(ops.MATMUL, build.transpose(rows, 0, 1), rows)
    follows = make(ops.MATMUL, rows, gradient)
    later = make(ops.TANH, make(ops.MATMUL, follows, build.transpose(rows, 0, 1)))
    graph = graph_of(gradient, later, inputs=[x])
    steps = schedule.planned_steps(graph, frozenset())
    assert later in steps[-1].writes


def test_no_store_takes_the_place_of_what_another_store_of_its_point_reads_later():
    x, w = given(64, 64), given(64, 64, index=1)
    h = make(ops.MATMUL, x, w)
    largest = build.max_of(x, (1,), keepdim=True)
    of_x, of_h = make(ops.EXP, x - largest), h + largest
    graph = graph_of(make(ops.MATMUL, of_x, w), make(ops.MATMUL, of_h, of_x), inputs=[x, w])
    operands = torch.randn(64, 64) / 8, torch.randn(64, 64) / 8
    ours = compiled(graph).launch(list(operands), [])
    expected = EagerBackend().compile(graph, 0, frozenset()).launch(list(operands), [])
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
