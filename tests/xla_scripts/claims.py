"""What holds for every name of the stand-in for torch_xla."""

import importlib
import inspect
import pickle
import warnings
from pathlib import Path

import torch

from ltc.compat.torch_xla.alias_table import MODULES
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
