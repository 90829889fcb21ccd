"""Calls as the recorder hands them over, without a device: torch's own samples.

A call is (overload name, arguments in schema order), with a `Tensor` in place of each tensor.
"""

import functools
import itertools
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch.testing._internal import common_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ltc.aten.call import CallResult, Scalar
from ltc.aten.schema import overload_named, schema_of
from ltc.device.recording import signature as kinds
from ltc.device.recording.signature import Signature
from ltc.device.recording.slow_path import _NUMBER_TYPES

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "compare"))
from operator_table import op_db

# Families of torch's table whose operators come to no overload that others do not come to.
LEFT_OUT = ("linalg.", "special.", "fft.", "signal.", "masked.", "sparse.", "nn.functional.scaled")
_TENSOR_KINDS = (kinds.TENSOR, kinds.OPTIONAL_TENSOR, kinds.TENSORS, kinds.OPTIONAL_TENSORS)


signature_of = functools.cache(lambda name: Signature(overload_named(name)))


@dataclass(frozen=True, eq=False)
class Tensor:
    """What a call sees of a tensor; the same one twice is one tensor."""

    shape: tuple
    dtype: torch.dtype

    def __repr__(self):
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def is_tensor(leaf) -> bool:
    return isinstance(leaf, Tensor)


# --- as the recorder has it ---------------------------------------------------------------------


def recorded(name: str, values: list) -> tuple:
    """(overload, args, kwargs, mutated, returned): what `result_types` is asked with."""
    signature = signature_of(name)
    overload = signature.overload
    known: dict = {}
    args, kwargs = [], {}
    for argument, value in zip(signature.arguments, values, strict=True):
        operand = _operand(argument, value, known)
        if argument.kind in (kinds.DEVICE, kinds.IGNORED):
            operand = argument.default
        if not argument.keyword_only:
            args.append(operand)
        elif operand is not None and argument.kind not in (kinds.DEVICE, kinds.IGNORED):
            kwargs[argument.name] = operand
    if any(a.kind == kinds.DEVICE for a in signature.arguments):
        kwargs["device"] = torch.device("meta")
    arguments = signature.arguments
    mutated = tuple(
        arguments[i].name if arguments[i].keyword_only else i for i in signature.written_by(values)
    )
    return overload, tuple(args), kwargs, mutated, not signature.returns_written


def _operand(argument, value, known: dict):
    if argument.kind in _TENSOR_KINDS:
        return tree_map(lambda leaf: _tensor_operand(leaf, known), value, is_leaf=is_tensor)
    if argument.kind == kinds.NUMBERS and value is not None:
        return [_number(number) for number in value]
    if argument.kind != kinds.NUMBER or value is None:
        return value
    is_static = argument.static is None or (argument.static and value in argument.static)
    return value if is_static else _number(value)


def _tensor_operand(leaf, known: dict):
    if is_tensor(leaf):
        return known.setdefault(leaf, CallResult(None, None, 0, leaf.shape, leaf.dtype))
    if isinstance(leaf, torch.Tensor):
        return Scalar(0, leaf, leaf.dtype, False, "operand")
    return None if leaf is None else _number(leaf)


def _number(value) -> Scalar:
    return Scalar(0, value, _NUMBER_TYPES[type(value)], True, "number")


# --- torch's samples ----------------------------------------------------------------------------


class _Noted(TorchDispatchMode):
    """Notes the calls of these overloads."""

    def __init__(self, names) -> None:
        super().__init__()
        self.names, self.calls = names, []

    def __torch_dispatch__(self, overload, types, args=(), kwargs=None):
        if overload.name() in self.names:
            known: dict = {}
            values = signature_of(overload.name()).in_schema_order(args, kwargs or {})
            self.calls.append((overload.name(), tree_map(lambda x: _seen(x, known), values)))
        return overload(*args, **(kwargs or {}))


def _seen(leaf, known: dict):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return known.setdefault(id(leaf), Tensor(tuple(leaf.shape), leaf.dtype))


def of_torchs_table(
    names, samples: int, dtypes=(torch.float32, torch.int64), left_out=LEFT_OUT
) -> dict[str, list]:
    """Overload -> arguments of calls that torch's table of operators makes, gradients included.

    Args:
        names: of the overloads
        samples: of each operator and dtype
        dtypes: of the samples
        left_out: beginnings of names of operators that are not run
    """
    noted = _Noted(names)
    with mock.patch.object(common_utils, "set_rng_seed", lambda seed=None: None):
        for op, dtype in itertools.product(op_db, dtypes):
            if dtype in op.dtypes and not (left_out and op.name.startswith(left_out)):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _run_samples(op, dtype, samples, noted)
    calls: dict[str, dict] = {}
    for name, values in noted.calls:
        calls.setdefault(name, {}).setdefault(repr(values), values)
    return {name: list(different.values()) for name, different in calls.items()}


def _run_samples(op, dtype: torch.dtype, samples: int, noted: _Noted) -> None:
    differentiable = dtype.is_floating_point and op.supports_autograd
    given = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
    while True:
        try:
            sample = next(given, None)
        except Exception:  # an operator that this build has not
            return
        samples -= 1
        if sample is None or samples < 0:
            return
        try:
            with noted:
                result = op.op(sample.input, *sample.args, **sample.kwargs)
                leaves = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
                leaves = [x for x in leaves if x.requires_grad]
                torch.autograd.backward(leaves, [torch.ones_like(x) for x in leaves])
        except Exception:  # what torch refuses is no sample
            continue


# --- calls by their schemas ---------------------------------------------------------------------


def of_lists(name: str) -> list:
    """Arguments for an operation on lists: three tensors of different shapes in each."""
    shapes = (3,), (2, 3), ()
    by_type = {
        "List[Tensor]": lambda: [Tensor(shape, torch.float32) for shape in shapes],
        "List[number]": lambda: [0.1, 0.2, 0.3],
        "Tensor": lambda: Tensor((), torch.float32),
        "number": lambda: 0.5,
        "float": lambda: 0.5,
        "bool": lambda: False,
    }
    arguments = schema_of(name).arguments
    values = [by_type.get(str(a.type), lambda: None)() for a in arguments]
    for place, argument in enumerate(arguments):
        if argument.name == "state_steps":
            values[place] = [Tensor((), torch.float32) for _ in shapes]
        elif argument.name == "max_exp_avg_sqs":
            values[place] = []
    return values
