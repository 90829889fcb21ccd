"""How PyTorch's CPU kernels are called, whoever calls them."""

import ast
from pathlib import Path

import pytest
import torch

import ltc
from ltc.backends.kernel_call import kernel_call, owned
from ltc.device.recording import fallback
from ltc.device.recording.signature import Signature
from ltc.device.recording.tensors import state_of
from ltc.errors import OutOfRangeIndexError

aten = torch.ops.aten


def test_operands_are_left_as_they_are_and_what_is_written_comes_first():
    x = torch.zeros(3)
    (made,) = kernel_call(aten.add_.Tensor).run([x, 1], {}, (0,), False)
    assert x.tolist() == [0, 0, 0] and made.tolist() == [1, 1, 1]
    lists = [torch.zeros(2), torch.ones(1)]
    made = kernel_call(aten._foreach_add_.Scalar).run([lists, 1], {}, (0,), False)
    assert [one.tolist() for one in made] == [[1, 1], [2]] and lists[0].tolist() == [0, 0]
    out = torch.zeros(3)
    written, *rest = kernel_call(aten.add.out).run([x, 2], {"out": out}, ("out",), False)
    assert written.tolist() == [2, 2, 2] and not rest and out.tolist() == [0, 0, 0]


def test_what_nobody_reads_any_more_is_written_over_where_nothing_else_is_in_its_memory():
    kernel, x = kernel_call(aten.mul_.Tensor), torch.ones(2, 2)
    (made,) = kernel.run([x, 2], {}, (0,), False, [id(x)])
    assert made is x
    row = x[0]
    (made,) = kernel.run([x, 2], {}, (0,), False, [id(x)])
    assert made is not x and row.tolist() == [2, 2]
    assert owned([None, 3]) == [None, 3]


def test_kernels_that_need_it_are_given_contiguous_operands_in_lists_too():
    x = torch.ones(2, 3).t()
    assert kernel_call(aten.add.Tensor).laid(x) is x
    laid = kernel_call(aten.index.Tensor).laid([x, None, "mean", torch.device("ltc")])
    assert laid[0].is_contiguous() and laid[1:] == [None, "mean", torch.device("cpu")]


def test_results_are_flat_and_none_is_an_operand():
    values, indices = kernel_call(aten.max.dim).run([torch.ones(2, 3), 0], {})
    assert values.shape == indices.shape == (3,)
    parts = kernel_call(aten.unbind.int).run([torch.ones(2, 3)], {})
    assert [part.shape for part in parts] == [(3,), (3,)]
    kernel, x = kernel_call(aten.contiguous.default), torch.ones(2)
    (made,) = kernel.run([x], {})
    assert made is x and kernel.settled(made, x.dtype) is not x
    assert kernel.settled(made, torch.float64).dtype is torch.float64


@pytest.mark.parametrize("overload", [aten.empty_like.default, aten.new_empty.default])
def test_memory_without_values_holds_zeros(overload):
    sizes = [[1000]] if overload is aten.new_empty.default else []
    junk = torch.full((1000,), 7.0)
    del junk
    (made,) = kernel_call(overload).run([torch.ones(1000), *sizes], {})
    assert not made.any()


@pytest.mark.parametrize(
    ("overload", "args", "generator"),
    [(aten.bernoulli.p, (0.5,), True), (aten.native_dropout.default, (0.5, True), False)],
)
def test_random_numbers_follow_from_the_seed_and_the_process_has_its_own(overload, args, generator):
    kernel, x = kernel_call(overload), torch.ones(64)
    before = torch.default_generator.get_state()
    first, again, other = (kernel.run([x, *args], {}, seed=n)[0] for n in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.default_generator.get_state(), before)
    assert generator == any(a.name == "generator" for a in overload._schema.arguments)


def test_sums_of_16_bits_are_made_in_32():
    ones = torch.ones(4096, dtype=torch.bfloat16)
    (total,) = kernel_call(aten.prod.default).run([ones * 1.01], {})
    assert total == (ones * 1.01).float().prod().bfloat16()


def test_a_gradient_looks_at_the_values_that_its_forward_would_have_refused():
    kernel = kernel_call(aten.embedding_dense_backward.default)
    with pytest.raises(OutOfRangeIndexError):
        kernel.run([torch.ones(1, 2), torch.tensor([7]), 3, -1, False], {})


def test_a_call_that_cannot_be_recorded_runs_alike_in_autocast_and_begins_with_zeros():
    lazy = torch.randn(4, 4).to("ltc")
    device = state_of(lazy).device
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = fallback.run_eagerly(Signature(aten.mm.default), [lazy, lazy], device)
    assert made.dtype is torch.float32
    junk = torch.full((4, 4), 7.0)
    del junk
    empty = Signature(aten.empty_like.default)
    values = empty.in_schema_order((lazy,), {})
    assert not fallback.run_eagerly(empty, values, device).cpu().any()


# Other places that call an overload, and what they call it on: no kernel computes there.
NO_KERNEL = {
    "aten/rules/movement.py": "a tensor without memory, for the type of a view",
    "backends/interpreter/view_chains.py": "a tensor, for a view of it",
    "compat/torch_xla/device_strings.py": "ltc's tensors, for one of torch_xla's functions",
    "device/hooks/autocast.py": "ltc's tensors, in the dtype that autocast chooses",
    "device/ops/copies.py": "a tensor on the CPU, for another of its dtype",
    "device/ops/sparse_coo.py": "the values of a sparse tensor of the device",
    "device/recording/slow_path.py": "a tensor without elements, for eager's error",
    "device/recording/strides.py": "a tensor without memory, for the strides of a view",
    "device/shapes/meta.py": "a tensor without memory, for the type of a result",
    "device/storage_sharing.py": "a tensor without memory, for the strides of a view",
    "distributed/c10d/on_host.py": "gloo's tensors, for one of its collectives",
}


def overloads_called(file):
    """Yield the calls of something that is named an overload."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in ("overload", "cpu_function_of"):
                yield name


def test_there_is_one_caller_of_pytorchs_kernels():
    package = Path(ltc.__file__).parent
    called = {
        str(file.relative_to(package)): set(overloads_called(file))
        for file in package.rglob("*.py")
    }
    kernels = {file for file, names in called.items() if "cpu_function_of" in names}
    assert kernels == {"backends/kernel_call.py"}
    assert {file for file, names in called.items() if "overload" in names} == set(NO_KERNEL)
