"""The parts of a kernel: one operation may run as several native functions, one after the other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

KernelRecord = dict[str, Any]
_PART = re.compile(r"^part \d+ of ")
_SUMMED = ("seconds", "read_bytes", "written_bytes", "multiply_adds", "operations")


def whole_name(name: str) -> str:
    """Return the name of the kernel that a part belongs to."""
    return _PART.sub("", name)


def groups_of_parts(kernels: Iterable[KernelRecord]) -> list[list[KernelRecord]]:
    """Return the parts of each kernel, in order; of most kernels there is one."""
    groups: list[list[KernelRecord]] = []
    for kernel in kernels:
        last = groups[-1] if groups else []
        names = {one["name"] for one in last}
        is_of_it = whole_name(kernel["name"]) in {whole_name(name) for name in names}
        if is_of_it and kernel["name"] not in names:
            last.append(kernel)
        else:
            groups.append([kernel])
    return groups


def joined_parts(parts: list[KernelRecord]) -> KernelRecord:
    """Return the record of a whole kernel; it is launched as often as each part."""
    if len(parts) == 1:
        return parts[0]
    main = max(parts, key=lambda part: part.get("multiply_adds") or 0)
    summed = {key: sum(part.get(key) or 0 for part in parts) for key in _SUMMED}
    launches = max(part["launches"] for part in parts)
    return {**main, **summed, "name": whole_name(main["name"]), "launches": launches}


# --- in words ---------------------------------------------------------------------------------------

_SHAPE = re.compile(r"\[([^\]]*)\]")
_NAMED = re.compile(r"^([A-Za-z_][\w:.]*)((?: \[[^\]]*\])*)(?: then \[[^\]]*\] \d+->\d+ (.*))?")
_NEST = re.compile(r"^\[([^\]]*)\] \d+->\d+ (.*)$")
_COUNT = re.compile(r"^\d+\*")
_MOST_OPERATIONS = 3
_BACKWARD = {
    "convolution_input_gradient": "backward of input",
    "convolution_weight_gradient": "backward of weight",
}


def kernel_words(name: str, ops: Sequence[str] = ()) -> str:
    """Return the words for a kernel.

    Args:
        name: Its name in a trace.
        ops: The overloads that it computes, the main one first.
    """
    name = whole_name(name).removesuffix(", by PyTorch")
    nest = _NEST.match(name)
    if nest is not None:
        return _nest_words(nest[1], nest[2], ops)
    named = _NAMED.match(name)
    if named is None:
        return name
    operation, shapes = named[1], [_sizes(one) for one in _SHAPE.findall(named[2])]
    follows = f", then {_listed(_operations(named[3]))}" if named[3] else ""
    return _product_words(operation, shapes) + follows


def _product_words(operation: str, shapes: list[list[str]]) -> str:
    if operation.startswith("convolution") and len(shapes) > 1:
        return _convolution_words(operation, *shapes[:2])
    if operation == "matmul" and len(shapes) > 1:
        return f"matrix product {_by(shapes[0])} by {_by(shapes[1])}"
    words = operation_words(operation)
    return f"{words} of {_by(shapes[0])}" if shapes else words


def _convolution_words(operation: str, first: list[str], second: list[str]) -> str:
    if operation == "convolution_weight_gradient":
        return f"conv, backward of weight, of {_by(first)} and {_by(second)}"
    made, read, *window = second
    told = f"conv {_by(window)}, {read} to {made} channels"
    backward = _BACKWARD.get(operation)
    if operation == "convolution_backward":
        backward = "backward"
        return f"conv, {backward}, of {_by(first)}"
    return f"{told}, {backward}" if backward else told


def _nest_words(space: str, did: str, ops: Sequence[str]) -> str:
    outer, _, inner = space.partition("|")
    known = [operation_words(one) for one in ops]
    words = _listed(list(dict.fromkeys(known))) or _listed(_operations(did))
    over = f" over {_by(inner.split())}" if inner.strip() else ""
    of = _by(outer.split())
    return f"{words}{over}, {of}" if of else f"{words}{over}"


def operation_words(overload: str) -> str:
    """Return "max pool2d backward" for "aten::max_pool2d_with_indices_backward"."""
    words = overload.rpartition("::")[2].partition(".")[0].strip("_")
    for ending, told in (
        ("_gradient", " backward"),
        ("_backward_data", " backward"),
        ("_forward", ""),
    ):
        words = words.replace(ending, told)
    return words.replace("_with_indices", "").replace("_", " ")


def _operations(did: str) -> list[str]:
    return [_COUNT.sub("", one).replace("_", " ") for one in did.split()]


def _listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - _MOST_OPERATIONS
    return ", ".join(names[:_MOST_OPERATIONS]) + (f" and {more} more" if more > 0 else "")


def _sizes(shape: str) -> list[str]:
    return [one.strip() for one in shape.split(",") if one.strip()]


def _by(sizes: Sequence[str]) -> str:
    return "x".join(sizes)
