"""Calls as the recorder hands them over, without a device: torch's own samples, and variations.

A call is (overload name, arguments in schema order), with a `Tensor` in place of each tensor.
"""

import functools
import itertools
import random
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
from ltc.aten.schema import schema_of
from ltc.device.recording import signature as kinds
from ltc.device.recording.fast_path import overload_named
from ltc.device.recording.signature import Signature
from ltc.device.recording.slow_path import _NUMBER_TYPES

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "compare"))
from operator_table import op_db

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.float8_e4m3fn),
)
NUMBERS = (0, 1, 2, -1, 1.5, 0.0, True, 1j, float("inf"), 0.5, 3.0)
CPU_TENSORS = tuple(torch.tensor(x) for x in (3.0, 2, True, 1j))
CPU_TENSORS += (torch.tensor(1.0, dtype=torch.float64),)
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


def of_torchs_table(names, samples: int) -> dict[str, list]:
    """Overload -> arguments of calls that torch's table of operators makes, gradients included."""
    noted = _Noted(names)
    with mock.patch.object(common_utils, "set_rng_seed", lambda seed=None: None):
        _run_table(samples, noted)
    calls: dict[str, dict] = {}
    for name, values in noted.calls:
        calls.setdefault(name, {}).setdefault(repr(values), values)
    return {name: list(different.values()) for name, different in calls.items()}


def _run_table(samples: int, noted: "_Noted") -> None:
    for op, dtype in itertools.product(op_db, (torch.float32, torch.int64)):
        if dtype in op.dtypes and not op.name.startswith(LEFT_OUT):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _run_samples(op, dtype, samples, noted)


def _run_samples(op, dtype: torch.dtype, samples: int, noted: _Noted) -> None:
    differentiable = dtype is torch.float32 and op.supports_autograd
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


# --- variations ---------------------------------------------------------------------------------


def varied(name: str, values: list, source: random.Random) -> list:
    """The arguments with other shapes, dtypes and numbers here and there; most calls stay right."""
    tensors = [leaf for leaf in tree_leaves(values, is_leaf=is_tensor) if is_tensor(leaf)]
    others: dict = {}
    if tensors and source.random() < 0.25:
        dtype = source.choice(DTYPES)
        others = {t: Tensor(t.shape, dtype) for t in tensors if t.dtype.is_floating_point}
    values = list(values)
    if tensors and source.random() < 0.2:
        values = _with_another_extent(values, tensors, others, source)
    for _ in range(source.choice((0, 1, 1, 1, 2, 3))):
        if tensors and source.random() < 0.6:
            chosen = source.choice(tensors)
            others[chosen] = _another_tensor(others.get(chosen, chosen), tensors, source)
        elif values:
            place = source.randrange(len(values))
            values[place] = _another_value(name, place, values[place], source)
    return tree_map(lambda leaf: others.get(leaf, leaf) if is_tensor(leaf) else leaf, values)


def _with_another_extent(values: list, tensors: list, others: dict, source) -> list:
    """Wherever one extent stands, in shapes and in lists of numbers, another one."""
    old = source.choice([extent for t in tensors for extent in t.shape] or [1])
    new = source.choice((0, 1, 2, 7))
    for t in tensors:
        present = others.get(t, t)
        shape = tuple(new if extent == old else extent for extent in present.shape)
        others[t] = Tensor(shape, present.dtype)
    return [
        [new if type(n) is int and n == old else n for n in v] if isinstance(v, list) else v
        for v in values
    ]


def _another_tensor(tensor: Tensor, tensors: list, source) -> Tensor:
    shape, dtype, place = list(tensor.shape), tensor.dtype, source.randrange(8)
    axis = source.randrange(len(shape)) if shape else None
    kind = source.randrange(7)
    if kind == 0:
        dtype = source.choice(DTYPES)
    elif kind == 1:
        shape.insert(place % (len(shape) + 1), source.choice((1, 1, 2, 0)))
    elif kind == 2:
        shape = []
    elif kind == 3:
        other = source.choice(tensors)
        shape, dtype = list(other.shape), source.choice((dtype, other.dtype))
    elif axis is not None and kind == 4:
        shape[axis] = source.choice((0, 1, 2, 3, 5))
    elif axis is not None and kind == 5:
        shape.pop(axis)
    else:
        shape = [1] * len(shape)
    return Tensor(tuple(shape), dtype)


def _another_value(name: str, place: int, value, source):
    argument = signature_of(name).arguments[place]
    type_ = str(schema_of(name).arguments[place].type)
    if argument.name in ("dtype", "input_dtype"):
        return source.choice((*DTYPES, *[None] * 5 * (argument.default is None)))
    if argument.name in ("layout", "memory_format", "device", "pin_memory"):
        return value
    if type_ in ("float", "Optional[float]"):
        return source.choice((0, 1, 2, -1, 1.5, 0.5, True))
    if argument.kind == kinds.NUMBER:
        return source.choice(NUMBERS)
    if argument.kind == kinds.TENSOR:
        is_pointwise = torch.Tag.pointwise in overload_named(name).tags and place > 0
        return source.choice((*CPU_TENSORS, *NUMBERS) if is_pointwise else CPU_TENSORS)
    if argument.kind == kinds.OPTIONAL_TENSOR:
        return None
    if isinstance(value, (list, tuple)) and value:
        return _another_list(list(value), source)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + source.choice((-3, -2, -1, 1, 2, 5)) if abs(value) < 1 << 60 else value
    if value is None and "int" in type_:
        return source.choice((None, [0], [0, 1], []) if "List" in type_ else (None, 0, 1, -1))
    return value


def _another_list(values: list, source) -> list:
    place = source.randrange(len(values))
    kind = source.randrange(4)
    if all(isinstance(value, bool) for value in values):
        values[place] = not values[place]  # their number is fixed
    elif kind == 0:
        values.pop(place)
    elif kind == 1:
        values.insert(place, source.choice((0, 1, 2, -1) if _are_numbers(values) else values))
    elif _are_numbers(values):
        others = (-2, -1, 1, 2) if isinstance(values[place], int) else (1, 2.5, True, 1j)
        values[place] = source.choice(others)
    return values


def _are_numbers(values: list) -> bool:
    return all(isinstance(value, (int, float)) for value in values)
