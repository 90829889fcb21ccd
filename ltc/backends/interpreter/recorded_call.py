"""One recorded call, run on CPU tensors: on PyTorch's kernel, or as its rule says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Scalar
from ltc.backends.interpreter.view_chains import write_through
from ltc.backends.kernel_call import REFUSALS, kernel_call, owned
from ltc.errors import InvalidGraph

Values = Mapping[CallResult, torch.Tensor]
Results = list["torch.Tensor | None"]


def is_by_rule(call: Call) -> bool:
    """Return True if only the call's rule can run it: it draws, or begins with undefined memory."""
    return call.seed is not None or kernel_call(call.overload).leaves_undefined


def run_by_kernel(
    call: Call, values: Values, numbers: Any, writable: Collection[CallResult] = ()
) -> Results | None:
    """Return the call's results; None if its kernel cannot make them, or gives other shapes.

    Args:
        values: The values of its operands.
        numbers: The values of its scalars, by their slots.
        writable: The operands that are not read afterwards: they may be written over.

    Raises:
        Exception: The kernel's error, if an operand may be half written: no rule may read it then.
    """
    kernel = kernel_call(call.overload)

    def given(argument: Any) -> Any:
        kind = argument.__class__
        if kind is CallResult:
            return values[argument]
        if kind is Scalar:
            return numbers[argument.slot]
        return argument

    args, kwargs = call.filled(given)
    ids = [id(values[one]) for one in writable]
    try:
        found = kernel.run(args, kwargs, call.mutated, call.returned, ids)
    except REFUSALS as error:
        if call.mutated and kernel.may_have_written(error):
            raise
        return None
    if not _are_as_recorded(found, call):
        if call.mutated:
            raise InvalidGraph(f"{call.name} gives another shape than was recorded")
        return None
    return [
        None if one is None else kernel.settled(tensor, one.dtype)
        for tensor, one in zip(found, call.results)
    ]


def _are_as_recorded(found: Results, call: Call) -> bool:
    results = call.results
    return len(found) == len(results) and all(
        one is None or (tensor is not None and tensor.shape == one.shape)
        for tensor, one in zip(found, results)
    )


# --- ltc's own calls -------------------------------------------------------------------------------


def _write_view(call: Call, values: Values, writable: Collection[CallResult]) -> Results:
    """The base with what a chain of views shows replaced."""
    base, new, chain = call.args
    whole = owned(values[base], [id(values[base])] if base in writable and base is not new else ())
    write_through(whole, chain, values[new])
    return [whole]


def _passed_on(call: Call, values: Values, writable: Collection[CallResult]) -> Results:
    return [torch.ops.aten.alias(values[call.args[0]])]


OWN_CALLS: dict[str, Callable[[Call, Values, Collection[CallResult]], Results]] = {
    "ltc::write_view": _write_view,
    "ltc::barrier": _passed_on,
}
