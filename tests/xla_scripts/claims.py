"""What holds for every name of the stand-in for torch_xla."""

import importlib
import inspect
import pickle
import warnings
from pathlib import Path

import torch

from ltc.compat.torch_xla.alias_modules import MODULES
from ltc.compat.torch_xla.xla_device import XlaDevice
from ltc.compat.torch_xla.xla_only import XlaOnly
from ltc.errors import Unsupported

NAMES = Path(__file__).with_name("names.txt")
PAGE = Path(__file__).parents[2] / "docs" / "torch_xla.md"


def listed():
    """(module, name) of all that torch_xla's users may know."""
    for line in NAMES.read_text().splitlines():
        if not line.startswith("#"):
            module, _, names = line.partition(": ")
            for name in names.split():
                yield module, name


def check_every_name_of_torch_xla_is_there_or_says_why_not():
    missing = []
    for module, name in listed():
        row = MODULES.get(module)
        known = row is not None and (
            name in row.found
            or name in row.refused
            or row.otherwise
            or f"{module}.{name}" in MODULES
        )
        if not known or getattr(importlib.import_module(module), name, None) is None:
            missing.append(f"{module}.{name}")
    assert not missing, missing


def check_every_name_of_the_table_is_given():
    for path, row in MODULES.items():
        module = importlib.import_module(path)
        assert set(row.found) | set(row.refused) <= set(dir(module))
        for name in row.found:
            assert not isinstance(getattr(module, name), type(refused_class())), f"{path}.{name}"


def refused_class():
    return importlib.import_module("torch_xla.distributed.spmd").Mesh


def check_what_belongs_to_xla_raises_one_error_that_says_what_to_do():
    assert issubclass(XlaOnly, Unsupported)
    for path, row in MODULES.items():
        module = importlib.import_module(path)
        names = {**row.refused, **({"anything": row.otherwise} if row.otherwise else {})}
        for name, reason in names.items():
            stand_in = getattr(module, name)
            for use in (lambda s=stand_in: s(1, x=2), lambda s=stand_in: s.attribute):
                try:
                    use()
                except XlaOnly as error:
                    assert f"{path}.{name}" in str(error) and reason in str(error)
                else:
                    raise AssertionError(f"{path}.{name} does not raise")
            assert inspect.isclass(stand_in) and not isinstance(3, stand_in)
            assert reason in repr(stand_in)


def check_a_wrong_name_is_an_attribute_error():
    for wrong in ("torch_xla.no_such_name", "torch_xla.core.xla_model.no_such_name"):
        path, _, name = wrong.rpartition(".")
        try:
            getattr(importlib.import_module(path), name)
        except AttributeError as error:
            assert "docs/torch_xla.md" in str(error)
        else:
            raise AssertionError(wrong)
    assert not hasattr(importlib.import_module("torch_xla.distributed.spmd"), "__wrapped__")


def check_modules_are_imported_in_every_way():
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla import runtime as xr
    from torch_xla.core import xla_model

    assert torch_xla.runtime is xr and torch_xla.core.xla_model is xm is xla_model
    everything = {}
    exec("from torch_xla.core.xla_model import *", everything)
    assert everything["optimizer_step"] is xm.optimizer_step
    try:
        importlib.import_module("torch_xla.no_such_module")
    except ModuleNotFoundError:
        return
    raise AssertionError("a module that there is not")


def check_a_device_is_a_value():
    device = XlaDevice(1)
    assert pickle.loads(pickle.dumps(device)) == device and hash(device) == hash(XlaDevice(1))
    assert device != XlaDevice(0) and device != "cpu" and device != 1 and device != None  # noqa: E711
    assert device != torch.device("cpu") and device != torch.device("xla")
    assert f"{device:>8}" == "   xla:1" and repr(device) == "device(type='xla', index=1)"


def check_a_loader_serves_a_device_by_every_name_of_it():
    pl = importlib.import_module("torch_xla.distributed.parallel_loader")
    xm = importlib.import_module("torch_xla.core.xla_model")
    names = (
        torch.device("xla:0"),
        "xla:0",
        "xla",
        torch.device("xla"),
        0,
        "ltc:0",
        xm.xla_device(),
    )
    for made_with in names:
        loader = pl.ParallelLoader([(torch.ones(2, 2),)] * 3, [made_with])
        for asked_with in names:
            seen = [batch[0] for batch in loader.per_device_loader(asked_with)]
            assert [x.device == torch.device("ltc:0") for x in seen] == [True] * 3
        assert [x.sum().item() for (x,) in pl.PerDeviceLoader(loader, "xla:0")] == [4.0] * 3
        assert loader.next_item(torch.device("xla:0"))[0].device == xm.xla_device()
        loader.close()
    for wrong in ("xla:1", torch.device("xla:1"), "ltc:1"):
        loader = pl.ParallelLoader([], ["xla:0"])
        try:
            loader.per_device_loader(wrong)
        except (KeyError, RuntimeError) as error:
            assert "1" in str(error)
        else:
            raise AssertionError(f"{wrong} was served")


def check_ignored_advice_is_told_once_at_the_line_that_gives_it():
    import torch_xla.backends as backends

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for precision in ("high", "default"):
            backends.set_mat_mul_precision(precision)
    assert [Path(one.filename).name for one in told] == ["claims.py"]
    assert "mat_mul_precision" in str(told[0].message)
    assert backends.get_mat_mul_precision() == "default"
    try:
        backends.set_mat_mul_precision("lowest")
    except ValueError as error:
        assert "'lowest'" in str(error)
    else:
        raise AssertionError("a precision that there is not")


def check_a_tensor_says_where_it_is_as_the_script_knows_it():
    import torch_xla.core.xla_model as xm

    tensor = torch.ones(2, device="xla")
    device = tensor.device
    assert (device.type, device.index, str(device)) == ("xla", 0, "xla:0")
    assert device == torch.device("xla:0") and torch.device("xla:0") == device == xm.xla_device()
    assert tensor.cpu().device == torch.device("cpu") and tensor.cpu().device.type == "cpu"
    made = [
        torch.ones(2, device=device),
        tensor.to(device),
        torch.nn.Linear(2, 2).to(device).weight,
    ]
    with device:
        made.append(torch.ones(2))
    made += [tensor.new_ones(2), torch.nn.Parameter(tensor), torch.ones(2).to(torch.device(device))]
    assert all(x.is_ltc and x.device.type == "xla" for x in made)
    assert {device: 1}[xm.xla_device()] == 1 and pickle.loads(pickle.dumps(device)) == device
    assert torch.nn.functional.linear(tensor, tensor.expand(3, 2)).tolist() == [2.0] * 3


def check_operations_built_by_hand():
    from torch_xla.core import xla_builder as xb
    from torch_xla.core import xla_op_registry as xor

    def compare(function, expected, *tensors, **kwargs):
        operation = xor.register("named", function)
        found = operation(*[x.to("xla") for x in tensors], **kwargs)
        torch.testing.assert_close(found.cpu(), expected)

    a, b = torch.randn(2, 3), torch.randn(2, 3)
    compare(lambda a, b: (a + b) * a - b / a, (a + b) * a - b / a, a, b)
    compare(lambda a, b: a.max(b).tanh().reshape((6,)), torch.maximum(a, b).tanh().reshape(6), a, b)
    whole, other = torch.tensor([7, -7]), torch.tensor([2, 2])
    compare(lambda a, b: a / b, torch.tensor([3, -3]), whole, other)
    compare(lambda a, b: a % b, torch.tensor([1, -1]), whole, other)
    compare(lambda a: a.broadcast_in_dim((4, 2, 3), (1, 2)), a.expand(4, 2, 3), a)
    compare(lambda a: a.slice((0, 1), (2, 3)).transpose((1, 0)), a[:, 1:].T.contiguous(), a)
    compare(lambda a: a.cast(xb.Type.S32), a.int(), a)
    zero = lambda a: xb.Op.zero(a.builder(), xb.Type.F32)  # noqa: E731
    compare(lambda a: a.reduce(zero(a), lambda x, y: x + y, (1,)), a.sum(1), a)
    compare(lambda a: a.reduce_all(zero(a), lambda x, y: x.max(y)), a.max().clamp(min=0), a)
    compare(lambda a: a.reduce(zero(a), lambda x, y: x + y, (0,)), torch.zeros(3), a[:0])
    shape = xb.mkshape(xb.Type.S32, (2, 3))
    numbers = torch.arange(3, dtype=torch.int32).expand(2, 3)
    compare(lambda a: xb.Op.iota(a.builder(), shape, 1), numbers, a)

    def branch(k, a, b):
        bound = xb.Op.scalar(k.builder(), 0.5, dtype=k.shape().dtype)
        return (k > bound).mkconditional((a, b), lambda a, b: a + b, lambda a, b: a - b)

    compare(branch, a + b, torch.tensor(0.7), a, b)
    compare(branch, a - b, torch.tensor(0.2), a, b)

    def loop(a, limit):
        one = xb.Op.one(a.builder(), xb.Type.S32)
        state = xb.Op.mkwhile(
            (one.zeros_like(), a),
            lambda n, x: n < xb.Op.scalar(a.builder(), limit, xb.Type.S32),
            lambda n, x: (n + one, x + x),
        )
        return state.get_tuple_element(1)

    compare(loop, a * 8, a, limit=3)
    matrix, right = torch.randn(3, 3) + 4 * torch.eye(3), torch.randn(3, 2)
    for lower in (True, False):
        for transposed in (True, False):
            whole = matrix.tril() if lower else matrix.triu()
            solved = torch.linalg.solve(whole.T if transposed else whole, right)
            solve = lambda m, b, **how: m.triangualr_solve(b, True, **how)  # noqa: E731
            compare(solve, solved, whole, right, lower=lower, transpose_a=transposed)

    weight = torch.ones(2, device="xla", requires_grad=True)
    xor.register("square", lambda x: x * x)(weight).sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0]
    try:
        xor.register("conv", lambda x: x.conv(x))(weight)
    except XlaOnly as error:
        assert "Op.conv" in str(error)
    else:
        raise AssertionError("an operation that there is not")


def check_boxes_that_overlap_better_ones_are_left_out():
    import torch_xla.core.functions as xf

    boxes = torch.tensor([(0, 0, 3, 2), (3, 3, 11, 7), (2, 2, 5, 7), (7, 4, 15, 12)]).float()
    scores = torch.tensor([0.9, 0.5, 0.95, 0.4])

    def nms(least, overlap, size, boxes=boxes, scores=scores):
        operands = (
            x.to("xla") for x in (boxes, scores, torch.tensor(least), torch.tensor(overlap))
        )
        chosen, valid = xf.nms(*operands, size)
        assert chosen.dtype is valid.dtype is torch.int32 and chosen.is_ltc
        return chosen.tolist(), valid.item()

    assert nms(0.1, 0.08, 4) == ([2, 0, 3, 1], 3)
    assert nms(0.1, 0.9, 4) == ([2, 0, 1, 3], 4)
    assert nms(0.45, 0.9, 3) == ([2, 0, 1], 3)
    assert nms(0.93, 0.08, 2) == ([2, 0], 1)
    assert nms(0.1, 0.08, 4, boxes=boxes[:, [2, 3, 0, 1]]) == ([2, 0, 3, 1], 3)
    assert nms(0.1, 0.5, 0, boxes[:0], scores[:0]) == ([], 0)
    try:
        nms(0.1, 0.5, 5)
    except ValueError as error:
        assert "output_size 5" in str(error)
    else:
        raise AssertionError("more boxes than there are")


def check_two_runs_are_compared_by_what_they_saved():
    import tempfile

    import torch_xla.debug.model_comparator as mc

    x = torch.randn(3, 2)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for folder, device, extra in ((first, "cpu", 0.0), (second, "xla", 0.5)):
            mc.configure(folder)
            mine = x.to(device)
            assert mc.save("input", mine) is mine
            mc.save("input", mine + extra)
            mc.save("output", mine * 2, step=1)
        mc.configure(None)
        assert mc.save("nothing", x) is x
        report = mc.compare(first, second, rtol=1e-3, atol=1e-3, max_diffs=2)
        assert mc.compare(first, first) == "" and "aborting after 2" in report
        assert "'input.1'" in report and "input.0" not in report and "output" not in report
    assert "different shape" in mc.compare_tensors(x, x[:1])
    assert mc.compare_tensors(torch.tensor([float("nan"), 1]), torch.tensor([float("nan"), 2]))
    assert mc.compare_tensors(x / 0, x / 0) == ""


def check_a_dimensions_size_is_a_tensor():
    import torch_xla

    found = torch_xla._XLAC._get_xla_tensor_dimension_size(
        torch.ones(4, 2, device="xla").nonzero(), 0
    )
    assert (found.item(), found.dtype, found.is_ltc) == (8, torch.int32, True)


def check_scripts_of_torch_jit_still_know_the_factories():
    def program(x: torch.Tensor):
        return x.to(torch.float64) + torch.tensor(2.0) + torch.as_tensor(1)

    assert torch.jit.script(program)(torch.ones(2)).tolist() == [4.0, 4.0]


def check_the_page_lists_every_module_and_name():
    text = PAGE.read_text()
    missing = [path for path in MODULES if f"`{path}`" not in text]
    for path, row in MODULES.items():
        lines = [line for line in text.splitlines() if line.startswith(f"| `{path}` |")]
        missing += [f"{path}.{n}" for n in row.found if not any(f"`{n}`" in line for line in lines)]
        missing += [
            f"{path}.{n}" for n in row.refused if not any(f"`{n}`" in line for line in lines)
        ]
    assert not missing, missing
