"""Recorded calls run one by one on PyTorch's kernels: what shares memory, what may be written to."""

import pytest
import torch

from ltc.aten.call import Call, CallResult, Numbering, Scalar
from ltc.backends.eager import EagerComputation
from ltc.backends.interpreter import interpreted
from ltc.backends.interpreter.interpreted import InterpretedComputation, NotInterpretable
from ltc.backends.kernel_call import cannot_fail, is_alone, quick_function, takes_any_strides
from ltc.ir.graph import Graph

aten = torch.ops.aten


def compiled(graph: Graph) -> EagerComputation:
    return EagerComputation(graph, frozenset())


class Calls:
    """A recording, written down call by call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.inputs = 0

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> CallResult:
        (value,) = self.add("ltc::input", (self.inputs,), [shape], dtype=dtype)
        self.inputs += 1
        return value

    def add(self, overload, args, shapes, dtype=torch.float32, **options) -> list[CallResult]:
        call = Call(overload, args, options.pop("kwargs", {}), **options)
        call.results = tuple(
            None if shape is None else CallResult(None, call, index, tuple(shape), dtype)
            for index, shape in enumerate(shapes)
        )
        self.calls.append(call)
        return list(call.results)

    def one(self, overload, *args, shape, **options) -> CallResult:
        (value,) = self.add(overload, args, [shape], **options)
        return value

    def computation(self, *outputs: CallResult, donated=()) -> InterpretedComputation:
        numbering = Numbering(self.calls)
        return InterpretedComputation(self.calls, outputs, numbering, frozenset(donated), compiled)


def test_calls_run_in_order_with_the_launchs_numbers():
    calls = Calls()
    x = calls.input(3)
    factor = Scalar(0, 2.0, torch.float64, True, "other")
    y = calls.one(aten.mul.Tensor, x, factor, shape=(3,))
    z = calls.one(aten.add.Tensor, y, x, shape=(3,))
    computation = calls.computation(z)
    for number in (2.0, 5.0):
        (made,) = computation.launch([torch.arange(3.0)], [number])
        assert made.tolist() == [0, number + 1, 2 * (number + 1)]


def test_an_input_that_is_not_donated_is_left_as_it_is():
    calls = Calls()
    x = calls.input(3)
    y = calls.one(aten.add_.Tensor, x, 1, shape=(3,), mutated=(0,), returned=False)
    given = torch.zeros(3)
    (made,) = calls.computation(y).launch([given], [])
    assert given.tolist() == [0, 0, 0] and made.tolist() == [1, 1, 1]


def test_a_donated_input_is_written_over():
    calls = Calls()
    x = calls.input(3)
    y = calls.one(aten.add_.Tensor, x, 1, shape=(3,), mutated=(0,), returned=False)
    given = torch.zeros(3)
    (made,) = calls.computation(y, donated=[0]).launch([given], [])
    assert made.data_ptr() == given.data_ptr() and made.tolist() == [1, 1, 1]


def test_a_donated_input_is_not_written_to_before_a_call_that_can_fail():
    calls = Calls()
    x, rows = calls.input(3), calls.input(1, dtype=torch.int64)
    y = calls.one(aten.add_.Tensor, x, 1, shape=(3,), mutated=(0,), returned=False)
    z = calls.one(aten.index_select.default, y, 0, rows, shape=(1,))
    given = torch.zeros(3)
    computation = calls.computation(y, z, donated=[0])
    with pytest.raises(Exception) as caught:
        computation.launch([given, torch.tensor([7])], [])
    assert given.tolist() == [0, 0, 0] and caught.value.overwritten == ()
    made, picked = computation.launch([given, torch.tensor([2])], [])
    assert made.tolist() == [1, 1, 1] and picked.tolist() == [1]


def test_a_value_that_is_read_later_is_copied_before_a_write():
    calls = Calls()
    x = calls.input(3)
    y = calls.one(aten.mul.Tensor, x, 2, shape=(3,))
    written = calls.one(aten.add_.Tensor, y, 1, shape=(3,), mutated=(0,), returned=False)
    total = calls.one(aten.add.Tensor, y, written, shape=(3,))
    (made,) = calls.computation(total).launch([torch.ones(3)], [])
    assert made.tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    "overload, args, shape",
    [
        (aten.t.default, (), (3, 2)),
        (aten.view.default, ([6],), (6,)),
        (aten.select.int, (0, 1), (3,)),
        (aten.expand.default, ([4, 2, 3],), (4, 2, 3)),
        (aten.detach.default, (), (2, 3)),
        ("ltc::barrier", (0,), (2, 3)),
    ],
)
def test_what_a_view_shows_is_copied_before_a_write(overload, args, shape):
    calls = Calls()
    x = calls.input(2, 3)
    y = calls.one(aten.mul.Tensor, x, 1, shape=(2, 3))
    view = calls.one(overload, y, *args, shape=shape)
    written = calls.one(aten.add_.Tensor, y, 1, shape=(2, 3), mutated=(0,), returned=False)
    given = torch.arange(6.0).reshape(2, 3)
    seen, made = calls.computation(view, written).launch([given], [])
    assert torch.equal(made, given + 1)
    shown = given if isinstance(overload, str) else overload(given, *args)
    assert torch.equal(seen, shown)


def test_outputs_are_contiguous_and_share_no_memory():
    calls = Calls()
    x = calls.input(2, 3)
    y = calls.one(aten.t.default, x, shape=(3, 2))
    z = calls.one(aten.select.int, x, 0, 1, shape=(3,))
    again = calls.one(aten.detach.default, z, shape=(3,))
    given = torch.arange(6.0).reshape(2, 3)
    made = calls.computation(x, y, z, again, x).launch([given], [])
    assert all(tensor.is_contiguous() and is_alone(tensor) for tensor in made)
    assert len({tensor.data_ptr() for tensor in [given, *made]}) == 6
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in made)
    assert torch.equal(made[1], given.t()) and torch.equal(made[3], given[1])


def test_two_donated_inputs_may_change_places():
    calls = Calls()
    x, y = calls.input(3), calls.input(3)
    given = [torch.zeros(3), torch.ones(3)]
    made = calls.computation(y, x, donated=[0, 1]).launch(given, [])
    assert [tensor.tolist() for tensor in made] == [[1, 1, 1], [0, 0, 0]]


def test_a_call_that_torchs_kernel_refuses_runs_by_its_rule():
    class Refused:
        asked = 0
        _schema = aten.mul.Tensor._schema

        def name(self) -> str:
            return "aten::mul.Tensor"

        def _op(self, *args):
            self.asked += 1
            raise NotImplementedError("not on this CPU")

    calls, overload = Calls(), Refused()
    x = calls.input(3)
    y = calls.one(overload, x, 2, shape=(3,))
    computation = calls.computation(y)
    for _ in range(2):
        (made,) = computation.launch([torch.ones(3)], [])
        assert made.tolist() == [2, 2, 2]
    assert overload.asked == 1


def test_a_result_of_another_shape_than_recorded_is_not_taken():
    calls = Calls()
    x = calls.input(3)
    y = calls.one(aten.mul.Tensor, x, 2, shape=(4,))
    with pytest.raises(Exception, match="was recorded"):
        calls.computation(y).launch([torch.ones(3)], [])


def often_run(calls: Calls, *outputs: CallResult, buffers, scalars=(), donated=()):
    """Each call has run before."""
    computation = calls.computation(*outputs, donated=donated)
    for _ in range(3):
        computation.launch([buffer.clone() for buffer in buffers], list(scalars))
    return computation


def test_calls_that_have_run_often_give_what_they_gave():
    calls = Calls()
    x, rows = calls.input(2, 3), calls.input(2, dtype=torch.int64)
    factor = Scalar(0, 2.0, torch.float64, True, "other")
    turned = calls.one(aten.t.default, x, shape=(3, 2))
    y = calls.one(aten.mul.Tensor, turned, factor, shape=(3, 2))
    z = calls.one(aten.index_select.default, y, 0, rows, shape=(2, 2))  # its operand is packed
    wide = calls.one(aten.cat.default, [z, y], shape=(5, 2))
    total = calls.one(aten.sum.default, wide, shape=(), kwargs={"dtype": torch.float64},
                      dtype=torch.float64)  # fmt: skip
    most, _ = calls.add(aten.max.dim, (wide, 0), [(2,), (2,)])
    new = calls.one(aten.add_.Tensor, x, 1, shape=(2, 3), mutated=(0,), returned=False)
    given = [torch.arange(6.0).view(2, 3), torch.tensor([2, 0])]
    often = often_run(calls, wide, total, most, new, buffers=given, scalars=[2.0], donated=[0])
    for step in range(3):
        x, rows = torch.randn(2, 3), torch.tensor([step, 1])
        y = (x.t() * (step + 3.0)).contiguous()
        expected = torch.cat([y[rows], y])
        made = often.launch([x, rows], [step + 3.0])
        assert torch.equal(made[0], expected) and torch.equal(made[2], expected.max(0).values)
        torch.testing.assert_close(made[1], expected.sum(dtype=torch.float64))
        assert made[3].data_ptr() == x.data_ptr()


def test_calls_that_have_run_often_run_one_by_one_again_after_an_error():
    calls = Calls()
    x, rows = calls.input(3), calls.input(1, dtype=torch.int64)
    y = calls.one(aten.index_select.default, x, 0, rows, shape=(1,))
    z = calls.one(aten.add_.Tensor, x, 1, shape=(3,), mutated=(0,), returned=False)
    often = often_run(calls, y, z, buffers=[torch.zeros(3), torch.tensor([1])], donated=[0])
    given = torch.zeros(3)
    with pytest.raises(Exception) as caught:
        often.launch([given, torch.tensor([7])], [])
    assert given.tolist() == [0, 0, 0] and caught.value.overwritten == ()
    made, new = often.launch([given, torch.tensor([2])], [])
    assert (made.tolist(), new.tolist()) == ([0], [1, 1, 1])


def test_a_result_that_has_another_shape_after_many_runs_is_made_by_the_rule():
    class Changing:
        is_short = False
        _schema = aten.mul.Tensor._schema
        tags = (torch.Tag.nondeterministic_seeded,)  # no function of torch's stands for it

        def name(self) -> str:
            return "aten::mul.Tensor"

        def _op(self, x, other):
            return (x * other)[:2] if self.is_short else x * other

    calls, overload = Calls(), Changing()
    x = calls.input(3)
    y = calls.one(overload, x, 2, shape=(3,))
    often = often_run(calls, y, buffers=[torch.ones(3)])
    overload.is_short = True
    for _ in range(2):
        (made,) = often.launch([torch.ones(3)], [])
        assert made.tolist() == [2, 2, 2]


def test_results_have_the_recorded_dtype():
    calls = Calls()
    x = calls.input(3)
    y = calls.one(aten.mul.Tensor, x, 2, shape=(3,), dtype=torch.float64)
    (made,) = calls.computation(y).launch([torch.ones(3)], [])
    assert made.dtype is torch.float64


def test_lists_are_read_and_written():
    calls = Calls()
    x, y = calls.input(3), calls.input(2)
    made = calls.add(
        aten._foreach_add_.Scalar, ([x, y], 1), [(3,), (2,)], mutated=(0,), returned=False
    )
    given = [torch.zeros(3), torch.zeros(2)]
    results = calls.computation(*made, donated=[0]).launch(given, [])
    assert [tensor.tolist() for tensor in results] == [[1, 1, 1], [1, 1]]
    assert [tensor.tolist() for tensor in given] == [[1, 1, 1], [0, 0]]


def test_undefined_results_are_left_out():
    calls = Calls()
    x, grad, weight = calls.input(2, 4), calls.input(2, 4), calls.input(4)
    mean, rstd = calls.input(2, 1), calls.input(2, 1)
    gx, nothing, other = calls.add(
        aten.native_layer_norm_backward.default,
        (grad, x, [4], mean, rstd, weight, weight, [True, False, False]),
        [(2, 4), None, None],
    )
    assert nothing is None and other is None
    given = [
        torch.randn(2, 4),
        torch.randn(2, 4),
        torch.ones(4),
        torch.zeros(2, 1),
        torch.ones(2, 1),
    ]
    (made,) = calls.computation(gx).launch(given, [])
    assert made.shape == (2, 4)


def test_an_exchange_needs_a_compiled_program():
    calls = Calls()
    x = calls.input(3)
    token = calls.one("ltc::collective_start", [x], None, None, shape=())
    with pytest.raises(NotInterpretable):
        calls.computation(token)


def test_an_operand_that_is_read_and_written_by_one_call_is_copied():
    """In a recording a call reads what was there before it."""
    calls = Calls()
    x, rows = calls.input(4), calls.input(4, dtype=torch.int64)
    y = calls.one(aten.mul.Tensor, x, 1, shape=(4,))
    z = calls.one(aten.index_put_.default, y, [rows], y, shape=(4,), mutated=(0,), returned=False)
    order = torch.tensor([1, 2, 3, 0])
    (made,) = calls.computation(z).launch([torch.arange(4.0), order], [])
    assert made.tolist() == [3, 0, 1, 2]


def test_a_write_that_fails_half_way_is_not_made_again_over_what_it_wrote():
    class HalfWay:
        _schema = aten.add_.Tensor._schema

        def name(self) -> str:
            return "aten::add_.Tensor"

        def _op(self, x, other):
            x[0] = 99
            raise RuntimeError("half way")

    calls = Calls()
    x = calls.input(3)
    y = calls.one(aten.mul.Tensor, x, 2, shape=(3,))
    z = calls.one(HalfWay(), y, 1, shape=(3,), mutated=(0,), returned=False)
    with pytest.raises(RuntimeError, match="half way"):
        calls.computation(z).launch([torch.ones(3)], [])


def test_numbers_that_are_equal_and_not_the_same_stay_apart():
    calls = Calls()
    x = calls.input(2)
    zeros = [calls.one(aten.full.default, [1], zero, shape=(1,)) for zero in (0.0, -0.0)]
    mask = calls.one(aten.sum.dim_IntList, x, (0,), False, shape=())
    split = calls.add(
        aten.native_layer_norm_backward.default,
        (calls.input(1, 4), calls.input(1, 4), [4], calls.input(1, 1), calls.input(1, 1), None, None,
         (True, False, False)),
        [(1, 4), None, None],
    )  # fmt: skip
    row = [torch.randn(1, 4), torch.randn(1, 4), torch.zeros(1, 1), torch.ones(1, 1)]
    made = calls.computation(*zeros, mask, split[0]).launch([torch.ones(2), *row], [])
    assert [torch.signbit(zero).item() for zero in made[:2]] == [False, True]
    assert made[2].item() == 2 and made[3].shape == (1, 4)


def test_a_negated_view_is_negated_for_rules_as_well():
    calls = Calls()
    x = calls.input(3, dtype=torch.complex64)
    part = calls.one(
        aten._neg_view.default, calls.one(aten.real.default, x, shape=(3,)), shape=(3,)
    )
    seed = Scalar(0, 1, torch.int64, True, "seed")
    kept = calls.one(aten.bernoulli.p, part, 1.0, shape=(3,), seed=seed)
    total = calls.one(aten.mul.Tensor, part, kept, shape=(3,))
    (made,) = calls.computation(total).launch([torch.tensor([1 + 2j, 3j, -2])], [3])
    assert made.tolist() == [-1, 0, 2]


def test_random_numbers_follow_from_the_seed_alone():
    calls = Calls()
    x = calls.input(50)
    seed = Scalar(0, 1, torch.int64, True, "seed")
    y = calls.one(aten.bernoulli.p, x, 0.5, shape=(50,), seed=seed)
    computation = calls.computation(y)
    first, again, other = (computation.launch([torch.ones(50)], [n])[0] for n in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_no_call_goes_through_the_rules_that_torch_can_make(monkeypatch):
    calls = Calls()
    x = calls.input(3, 3)
    y = calls.one(aten.mm.default, x, x, shape=(3, 3))
    computation = calls.computation(y)
    monkeypatch.setattr(interpreted, "ByRule", None)
    (made,) = computation.launch([torch.eye(3)], [])
    assert torch.equal(made, torch.eye(3))


@pytest.mark.parametrize("name", ["aten::add_.Tensor", "aten::mm", "aten::permute", "aten::relu"])
def test_kernels_that_take_any_strides(name):
    assert takes_any_strides(name)


@pytest.mark.parametrize("name", ["aten::view", "aten::native_layer_norm", "mine::add"])
def test_kernels_that_are_given_contiguous_operands(name):
    assert not takes_any_strides(name)


def test_an_optimizers_update_cannot_fail():
    for name in (
        "aten::_foreach_addcdiv_.Scalar",
        "aten::_fused_adamw_",
        "ltc::adam_",
        "aten::sub_.Tensor",
    ):
        assert cannot_fail(name)
    for name in ("aten::index_select", "aten::linalg_inv_ex", "mine::add"):
        assert not cannot_fail(name)


def test_what_a_call_leaves_out_is_as_the_overload_has_it_after_many_runs():
    calls = Calls()
    x, y = calls.input(3), calls.input(3)
    loss = calls.one(aten.mse_loss.default, x, y, shape=())  # torch's function has another default
    given = [torch.arange(3.0), torch.ones(3)]
    (made,) = often_run(calls, loss, buffers=given).launch(given, [])
    assert made.tolist() == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("overload", "arguments"),
    [
        (aten.sum.default, ()),
        (aten.sum.dim_IntList, ([1], True)),
        (aten.mean.dim, ([0], False)),
        (aten.mul.Tensor, (2,)),
        (aten.add.Tensor, (1.5,)),
        (aten.pow.Tensor_Scalar, (3,)),
        (aten.clamp.default, (None, 0.5)),
        (aten.argmax.default, (1, False)),
        (aten._softmax.default, (1, False)),
        (aten.view.default, ([6],)),
        (aten.mse_loss.default, (torch.ones(2, 3), 1)),
    ],
)
def test_the_function_of_torch_that_takes_the_place_of_an_overload_gives_the_same(
    overload, arguments
):
    x = torch.randn(2, 3)
    function = quick_function(overload.name(), overload)
    assert function is not None and function is not overload
    torch.testing.assert_close(function(x, *arguments), overload(x, *arguments), rtol=0, atol=0)


@pytest.mark.parametrize(
    "overload", [aten.native_dropout.default, aten.rand_like.default, aten.add.Scalar]
)
def test_none_takes_the_place_of_one_that_is_random_or_called_otherwise(overload):
    assert quick_function(overload.name(), overload) is None
