"""Version counters, by which a backward refuses what was written to since it was kept for it.

torch counts the writes to single tensors itself, above every device's kernels. Those to lists of
tensors it leaves to the kernels, and so does it those of other namespaces' operations.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from ltc.device.recording.signature import TENSORS, Signature
from ltc.support.torch_private import has_kernel, increment_version, leave_to_python

# Their CPU kernels count nothing: a program that PyTorch takes is not to be refused.
_UNCOUNTED = ("aten::_fused_", "aten::_amp_")


def are_counted_here(signature: Signature) -> bool:
    """Return True if no other code counts the writes of this overload."""
    if not signature.written or signature.name.startswith(_UNCOUNTED):
        return False
    if has_kernel(signature.name, "ADInplaceOrView"):
        return False
    lists = any(signature.arguments[i].kind == TENSORS for i in signature.written)
    return lists or not signature.name.startswith("aten::")


def counting(kernel: FunctionType, namespace: dict) -> FunctionType:
    """`kernel`, and then the count; with the globals of one overload, as its kernels have."""
    namespace.update(uncounted=kernel, count_writes=_count_writes)
    return FunctionType(_counting.__code__, namespace)


def _counting(*args: Any, **kwargs: Any):
    made = uncounted(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821
    count_writes(signature, args, kwargs)  # type: ignore[name-defined]  # noqa: F821
    return made


leave_to_python(_counting.__code__)


def _count_writes(signature: Signature, args: tuple, kwargs: dict) -> None:
    values = signature.in_schema_order(args, kwargs)
    for i in signature.written:
        operand = values[i]
        tensors = operand if isinstance(operand, (list, tuple)) else (operand,)
        increment_version([tensor for tensor in tensors if tensor is not None])
