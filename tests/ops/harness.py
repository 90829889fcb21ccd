"""Runs one aten call through rules, passes and the eager backend, without tensors of the device."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ltc import config
from ltc.aten import registry
from ltc.aten.call import Call, CallResult, Numbering, Scalar
from ltc.aten.expansion import expand
from ltc.backends.eager import EagerBackend
from ltc.device.recording.signature import Signature
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.passes import pipeline

NUMBER_TYPES = ("number", "Optional[number]", "float", "Optional[float]")


class Recording:
    """Calls made by hand: `give` adds a tensor, `call` an overload, `run` computes values."""

    def __init__(self):
        self.calls: list[Call] = []
        self.buffers: list[torch.Tensor] = []
        self.scalars: list = []

    def give(self, tensor: torch.Tensor) -> CallResult:
        call = Call("ltc::input", (len(self.buffers),), {})
        self.buffers.append(tensor.detach().clone(memory_format=torch.contiguous_format))
        return self._add(call, [tensor])[0]

    def scalar(self, number, wrapped: bool = True) -> Scalar:
        dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}
        dtype = number.dtype if isinstance(number, torch.Tensor) else dtypes.get(type(number))
        self.scalars.append(number)
        return Scalar(len(self.scalars) - 1, number, dtype or torch.complex128, wrapped, "test")

    def call(self, overload, args, kwargs, like, mutated=(), returned=True, seed=None):
        """`like`: tensors of the types that the call gives."""
        line = "test.py:1 in test"
        return self._add(Call(overload, args, kwargs, mutated, returned, line, seed), like)

    def _add(self, call, like):
        call.results = tuple(
            None if t is None else CallResult(None, call, i, tuple(t.shape), t.dtype)
            for i, t in enumerate(like)
        )
        self.calls.append(call)
        return call.results

    def graph(self, outputs) -> Graph:
        with config.override(LTC_CHECK="1"):
            return pipeline.run(expand(self.calls, tuple(outputs)))

    def run(self, outputs, donated=frozenset()):
        outputs = list(outputs)
        graph = self.graph([o for o in outputs if o is not None])
        computation = EagerBackend().compile(graph, 0, frozenset(donated))
        numbering = Numbering(self.calls)
        buffers = [self.buffers[position] for position in numbering.inputs]
        scalars = [self.scalars[slot] for slot in numbering.slots]
        made = iter(computation.launch(buffers, scalars))
        return [None if o is None else next(made) for o in outputs]


def record(overload, args, kwargs, expected, seed=None) -> tuple[Recording, tuple]:
    """The call on `args`, with numbers lifted as the recorder does; `expected`: its results."""
    recording = Recording()
    static = registry.static_arguments(overload.name())
    schema = overload._schema.arguments
    names = {a.name: str(a.type) for a in schema}

    def operand(value, name):
        if isinstance(value, torch.Tensor):
            if value.dim() == 0 and getattr(value, "_is_zero_dim_cpu", False):
                return recording.scalar(value, wrapped=False)
            return recording.give(value)
        if isinstance(value, (list, tuple)):
            is_list = any(isinstance(v, torch.Tensor) for v in value)
            lifts = is_list or "List[number]" in names[name] or "List[float]" in names[name]
            return [operand(v, name) for v in value] if lifts else list(value)
        if isinstance(value, (bool, int, float, complex)) and _lifts(value, name):
            return recording.scalar(value)
        return value

    def _lifts(value, name):
        if name in static and (static[name] is None or value in static[name]):
            return False
        is_number = any(word in names[name] for word in ("number", "float", "Tensor"))
        return is_number and "SymInt" not in names[name]

    own_args = [operand(v, schema[i].name) for i, v in enumerate(args)]
    own_kwargs = {name: operand(v, name) for name, v in kwargs.items()}
    mutated, returned = writes_of(overload, args, kwargs)
    own_seed = None if seed is None else recording.scalar(seed)
    values = recording.call(overload, own_args, own_kwargs, expected, mutated, returned, own_seed)
    return recording, values


def writes_of(overload, args, kwargs):
    """(positions and names of the arguments written to, whether it returns more than those)."""
    signature = Signature(overload)
    written = signature.written_by(signature.in_schema_order(args, kwargs))
    mutated = [i if i < len(args) else signature.arguments[i].name for i in written]
    aliases = [r.alias_info for r in overload._schema.returns]
    returned = any(a is None or not a.is_write for a in aliases)
    return tuple(mutated), returned


def results_in_eager(overload, args, kwargs) -> list:
    """What the call gives on copies of its arguments, in the order of `Call.results`."""
    args, kwargs = tree_map(_copy, (list(args), dict(kwargs)))
    made = overload(*args, **kwargs)
    mutated, returned = writes_of(overload, args, kwargs)
    written = [args[m] if isinstance(m, int) else kwargs[m] for m in mutated]
    results = [t for t in tree_flatten(written)[0] if isinstance(t, torch.Tensor)]
    if returned:
        flat = made if isinstance(made, (list, tuple)) else [made]
        results += tree_flatten(list(flat), is_leaf=lambda x: x is None)[0]
    return results


def _copy(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone(memory_format=torch.contiguous_format)


def is_extern(recording: Recording, values) -> bool:
    graph = recording.graph([v for v in values if v is not None])
    return any(n.op is ops.EXTERN for n in schedule(*graph.outputs))


def run_both(overload, *args, **kwargs):
    """(results through ltc, results of eager)"""
    expected = results_in_eager(overload, args, kwargs)
    recording, values = record(overload, args, kwargs, expected)
    return recording.run(values), expected


class CheckingMode(TorchDispatchMode):
    """Inside it, every overload that has a rule is run through ltc too, and compared.

    checked   overload name -> how often
    failures  (overload name, what differed)
    """

    def __init__(self, compare, only=None):
        super().__init__()
        self.compare, self.only = compare, only
        self.checked: dict[str, int] = {}
        self.extern: set[str] = set()
        self.failures: list[tuple[str, str]] = []

    def __torch_dispatch__(self, overload, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = overload.name()
        if self._wanted(overload, name, args, kwargs):
            self._check(overload, name, args, kwargs)
        return overload(*args, **kwargs)

    def _wanted(self, overload, name, args, kwargs):
        if self.only is not None and name not in self.only:
            return False
        if registry.rule_of(name) is None or torch.Tag.nondeterministic_seeded in overload.tags:
            return False
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        strided = all(t.layout == torch.strided and not t.is_quantized for t in tensors)
        # A tensor of zeros without memory is autograd's own; comparing one with others crashes.
        has_memory = not any(t._is_zerotensor() for t in tensors) and "zerotensor" not in name
        return strided and has_memory and "empty" not in name

    def _check(self, overload, name, args, kwargs):
        try:
            expected = results_in_eager(overload, args, kwargs)
        except Exception:
            return
        self.checked[name] = self.checked.get(name, 0) + 1
        try:
            recording, values = record(overload, args, kwargs, expected)
            made = recording.run(values)
            if is_extern(recording, values):
                self.extern.add(name)
            for mine, theirs in zip(made, expected, strict=True):
                if theirs is not None:
                    self.compare(name, mine, theirs)
        except Exception as error:
            notes = " | ".join(getattr(error, "__notes__", []))
            operands = tree_map(_type_text, (args, kwargs))
            self.failures.append((name, f"{type(error).__name__}: {error} {notes} {operands}"))


def _type_text(value):
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else value


# Formulas of at most some tens of roundings; low precision computes in float32 and rounds once or
# twice where eager's kernels round elsewhere.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def compare(name, mine, theirs):
    """Equal type and values within a few roundings of the dtype."""
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, (mine, theirs)
    assert mine.is_contiguous()
    tolerance = TOLERANCE.get(theirs.dtype, 0)
    theirs = theirs.resolve_conj().resolve_neg()
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
