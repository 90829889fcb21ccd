"""One Python kernel per overload, written by this file from the overload's schema.

A generated kernel does the common case and nothing else: every operand is a lazy tensor or a
number (or there is none, and a device is named), and the call is the one that followed here the last
time.  It then moves the cursor, puts the numbers on the recording's list, and gives a new tensor (or a
new value to an old one) the recorded result.  Whatever else may be is `record`'s business.
`print(source_of("aten::add.Tensor"))` shows one.
"""

from __future__ import annotations

from threading import get_ident
from types import FunctionType
from typing import Any
from weakref import ref

import torch

from ltc import config
from ltc.aten.schema import overload_named
from ltc.backends.kernel_call import CPU, REFUSALS, contiguous
from ltc.backends.plain_dispatch import ITS_NAMES
from ltc.device.immediate.computed import ComputedValue, computed
from ltc.device.recording.at_once_lines import (
    RECORDED,
    at_once_lines,
    call_slow,
    conditions,
    errors_of,
    first_operand,
    indent,
    may_be_number,
    name_of,
    new_tensor_lines,
    recorder_of,
    returned_written,
)
from ltc.device.recording.entangled_lists import are_entangled
from ltc.device.recording.entries import KERNEL_FILE
from ltc.device.recording.run_now import (
    NeedsRule,
    hold,
    how_to_run,
    link_of,
    tensors_here,
)
from ltc.device.recording.signature import (
    ATTRIBUTE,
    NUMBER,
    NUMBERS,
    OPTIONAL_TENSOR,
    OPTIONAL_TENSORS,
    TENSOR,
    TENSORS,
    Argument,
    Signature,
)
from ltc.device.recording.slow_path import OTHER_OPERAND, is_forced, record
from ltc.device.recording.state import State
from ltc.device.recording.strides import repeats
from ltc.device.recording.sync import value_of, values_of
from ltc.device.recording.tensors import recorder_named
from ltc.device.recording.views import link_view, link_views, links_of, write
from ltc.device.shapes.numbers_that_fit import fits
from ltc.device.torch_device import storage_of
from ltc.device.versions import are_counted_here, counting
from ltc.support.torch_private import leave_to_python
from ltc.tracebacks import shorten

_BY_THEIR_NAMES = (
    record, recorder_named, value_of, values_of, State, get_ident, write, shorten, NeedsRule, computed,
    ComputedValue, link_of, link_view, links_of, link_views, repeats, hold, fits, contiguous, tensors_here,
    are_entangled,
)  # fmt: skip
_NAMESPACE = {
    **{one.__name__: one for one in _BY_THEIR_NAMES},
    "storage_of": storage_of,
    "ref": ref,
    "new_object": object.__new__,
    "alias": torch.ops.aten.alias.default,
    "on_cpu": CPU,
    "strided": torch.strided,
    "no_keywords": {},  # never changed
    "number_types": frozenset((float, int, bool, complex)),
    # what a kernel may find in place of a lazy tensor: another device's, a number, a wrapper
    "other_operand": OTHER_OPERAND,
    # the kernel does not take it; or its value is another thread's, or pending
    "refused": (*REFUSALS, AttributeError),
    **ITS_NAMES,
}


def build_kernel(signature: Signature, namespace: dict | None = None):
    """The function to register for this overload; `namespace` becomes its globals."""
    namespace = {} if namespace is None else namespace
    namespace.update(_NAMESPACE, signature=signature, overload=signature.overload)
    kernel = _recording_kernel(signature, namespace)
    return counting(kernel, namespace) if are_counted_here(signature) else kernel


def _recording_kernel(signature: Signature, namespace: dict) -> FunctionType:
    namespace["runnable"] = runnable = how_to_run(signature)
    runnable.runs_here &= not is_forced(signature)
    namespace["call"] = runnable.quick
    slow = namespace["slow"] = FunctionType(_thorough.__code__, namespace)
    source = _source(signature)
    if source is None or is_forced(signature) or config.value("LTC_LINES"):
        return slow
    for position, argument in enumerate(signature.arguments):
        namespace[f"default{position}"] = argument.default
        namespace[f"static{position}"] = argument.static
    exec(compile(source, KERNEL_FILE, "exec"), namespace)
    leave_to_python(namespace["kernel"].__code__)
    return namespace["kernel"]


def lazily_built(name: str):
    """A function that becomes the overload's kernel at its first call: most are never called.

    The kernel's code takes the place of its own, so that later calls pass no other function.
    There are thousands: each is two objects that Python's collector counts, and no more.
    """
    namespace = {"build": _build, "name": name, "shorten": shorten}
    namespace["kernel_so_far"] = FunctionType(_first_call.__code__, namespace)
    return namespace["kernel_so_far"]


def _build(kernel: FunctionType, name: str):
    built = build_kernel(Signature(overload_named(name)), kernel.__globals__)
    kernel.__defaults__, kernel.__kwdefaults__ = built.__defaults__, built.__kwdefaults__
    kernel.__code__ = built.__code__  # the last, since another thread may call it meanwhile
    return built


# Their code runs with the globals of one overload.


def _first_call(*args: Any, **kwargs: Any):
    try:
        kernel = build(kernel_so_far, name)  # type: ignore[name-defined]  # noqa: F821
        return kernel(*args, **kwargs)
    except BaseException as error:
        shorten(error)
        raise


def _thorough(*args: Any, **kwargs: Any):
    try:
        return record(signature, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821
    except BaseException as error:
        shorten(error)
        raise


def source_of(name: str) -> str:
    """The generated kernel of an overload, as text; "" where it always goes the thorough way."""
    return _source(Signature(overload_named(name))) or ""


# --- the text of a kernel ---------------------------------------------------------------------


def _source(signature: Signature) -> str | None:
    """The kernel's source, or None for an overload that none of the forms below fits."""
    arguments, first = signature.arguments, first_operand(signature)
    if first is None and (signature.device is None or signature.tensors):
        return None
    if not signature.returns_tensors or signature.checks_values:
        return None
    if signature.has_no_result:
        return None
    if any(a.written and a.kind not in (TENSOR, TENSORS) for a in arguments):
        return None
    if signature.is_view and first != 0:
        return None
    reads, key, scalars = _reads(signature)
    body = [
        "try:",
        *indent(reads),
        f"    recorder = {recorder_of(signature)}",
        f"except {errors_of(signature)}:",
        f"    return {call_slow(arguments)}",
        *_repeating_lines(signature),
        "session = recorder.now",
        "if session is None:",
        "    entry = recorder.cursor",
        f"    if entry.key == ({', '.join(['overload', *key])},) and recorder.thread == get_ident()"
        f"{conditions(signature)}{_fitting(signature)}:",
        "        recorder.last = entry",
        "        recorder.cursor = entry.next",
        *indent(indent(_scalar_lines(signature, scalars))),
        *indent(indent(_result_lines(signature))),
        *at_once_lines(signature, key, scalars),
        f"return {call_slow(arguments)}",
    ]
    leaving = ["except BaseException as error:", "    shorten(error)", "    raise"]
    lines = ["try:", *indent(body), *leaving]
    return "\n".join([f"def kernel({_parameters(arguments)}):", *indent(lines)])


def _repeating_lines(signature: Signature) -> list[str]:
    """Lines that leave a write to a view of repetitions, or to entangled lists, to the thorough way."""
    leave = f"    return {call_slow(signature.arguments)}"
    if signature.writes_lists:
        lists = [(i, a.written) for i, a in signature.tensors if a.kind == TENSORS]
        written, others = (
            "".join([f"states{i}, " for i, is_written in lists if is_written is of])
            for of in (True, False)
        )
        return [f"if are_entangled(({written}), ({others})):", leave]
    if not signature.writes_some:
        return []
    return ["if state0.base is not None and repeats(state0):", leave]


def _fitting(signature: Signature) -> str:
    """Conditions on numbers that a kernel refuses where they do not fit into the result's dtype."""
    names = [name_of(i, signature.arguments[i]) for i in signature.converted]
    return "".join(f" and fits({name}, entry.value.dtype)" for name in names)


def _parameters(arguments: tuple[Argument, ...]) -> str:
    parts, keyword_only = [], False
    for position, argument in enumerate(arguments):
        if argument.keyword_only and not keyword_only:
            keyword_only = True
            parts.append("*")
        default = f"=default{position}" if argument.has_default else ""
        parts.append(name_of(position, argument) + default)
    return ", ".join(parts)


def _reads(signature: Signature) -> tuple[list[str], list[str], list[str]]:
    """Lines that read the operands; the parts of the key; lines that put numbers on the list."""
    reads: list[str] = []
    key: list[str] = []
    scalars: list[str] = []
    for i, argument in enumerate(signature.arguments):
        name = name_of(i, argument)
        if argument.kind == TENSOR:
            is_number = may_be_number(signature, i)
            reads += _read_tensor(i, name, is_number)
            key.append(f"value{i}")
            if is_number:
                append = f"recorder.scalars.append({name})"
                scalars += [f"if value{i}.__class__ is type:", f"    {append}"]
        elif argument.kind == OPTIONAL_TENSOR:
            reads += [f"if {name} is None:", f"    value{i} = None", "else:"]
            reads += indent(_read_tensor(i, name, False))
            key.append(f"value{i}")
        elif argument.kind == TENSORS:
            reads += _read_tensors(i, name)
            key.append(f"value{i}")
        elif argument.kind == OPTIONAL_TENSORS:
            reads += _read_optional_tensors(i, name)
            key.append(f"value{i}")
        elif argument.kind == NUMBER:
            key.append(_number_key(i, name, argument))
            scalars += _number_lines(i, name, argument)
        elif argument.kind == NUMBERS:
            reads += [f"kinds{i} = None if {name} is None else list(map(type, {name}))"]
            key.append(f"kinds{i}")
            scalars += [f"if {name} is not None:", f"    recorder.scalars.extend({name})"]
        elif argument.kind == ATTRIBUTE:
            key.append(name)
        elif argument.kind not in ("device", "ignored", "generator"):
            raise AssertionError(f"{signature.name}: no fast form for {argument}")
    return reads, key, scalars


def _read_tensor(i: int, name: str, is_number: bool) -> list[str]:
    lines = [
        f"state{i} = storage_of({name}).lazy",
        f"value{i} = state{i}.value",
        f"if value{i} is None:",
        f"    value{i} = value_of(state{i})",
    ]
    if not is_number:
        return lines
    return [
        f"if {name}.__class__ in number_types:",
        f"    value{i} = {name}.__class__",
        "else:",
        *indent(lines),
    ]


def _read_tensors(i: int, name: str) -> list[str]:
    return [
        f"states{i} = [storage.lazy for storage in map(storage_of, {name})]",
        f"value{i} = [s.value for s in states{i}]",
        f"if not all(value{i}):",
        f"    value{i} = values_of(states{i})",
    ]


def _read_optional_tensors(i: int, name: str) -> list[str]:
    value = "storage_of(t).lazy.value or value_of(storage_of(t).lazy)"
    return [f"value{i} = [None if t is None else {value} for t in {name}]"]


def _number_key(i: int, name: str, argument: Argument) -> str:
    if argument.static is None:
        return f"({name}.__class__, {name})"
    if argument.static:
        return f"(({name}.__class__, {name}) if {name} in static{i} else {name}.__class__)"
    return f"{name}.__class__"


def _number_lines(i: int, name: str, argument: Argument) -> list[str]:
    if argument.static is None:
        return []
    conditions = []
    if argument.static:
        conditions.append(f"{name} not in static{i}")
    if (argument.has_default and argument.default is None) or not argument.has_default:
        conditions.append(f"{name} is not None")
    line = f"recorder.scalars.append({name})"
    return [f"if {' and '.join(conditions)}:", f"    {line}"] if conditions else [line]


def _scalar_lines(signature: Signature, scalars: list[str]) -> list[str]:
    seed = ["recorder.scalars.append(recorder.draw())"] if signature.random else []
    return seed + scalars


def _result_lines(signature: Signature) -> list[str]:
    """Lines that give the results to tensors, and the return."""
    arguments, written = signature.arguments, signature.written
    if signature.is_view:
        if signature.returns == ("Tensor",):
            return ["return link_view(recorder, a0, entry.value, entry.link)"]
        return ["return link_views(recorder, a0, entry.call.results, entry.link)"]
    if len(written) == 1 and arguments[written[0]].kind == TENSOR and signature.returns_written:
        lines = _write_lines(f"state{written[0]}", "entry.value")
    elif written:
        lines = ["results = iter(entry.call.results)"]
        for i in written:
            condition, writes = arguments[i].written_with, _write_next_lines(i, arguments[i].kind)
            if condition is not None:
                writes = [f"if {condition} is not None:", *indent(writes)]
            lines += writes
    else:
        lines = []
    if not signature.returns_written:
        return lines + _made_lines(signature)
    return [*lines, returned_written(signature)]


def _write_next_lines(i: int, kind: str) -> list[str]:
    """Lines that give a written argument its share of `results`."""
    if kind == TENSOR:
        return ["result = next(results)", *_write_lines(f"state{i}", "result")]
    # the states first: zip must not take a result that it has no state for
    return [
        f"for state, result in zip(states{i}, results):",
        *indent(_write_lines("state", "result")),
    ]


def _write_lines(state: str, result: str) -> list[str]:
    return [
        f"if {state}.value is not None and {state}.views is None:",
        f"    {state}.value = {result}",
        f"    {state}.buffer = None",
        "else:",
        f"    write({state}, {result})",
    ]


def _made_lines(signature: Signature) -> list[str]:
    if signature.returns == ("Tensor",):
        return [
            f"value = {'next(results)' if signature.written else 'entry.value'}",
            *new_tensor_lines(),
            RECORDED,
            "return tensor",
        ]
    return [
        "tensors = []",
        f"for value in {'results' if signature.written else 'entry.call.results'}:",
        "    if value is None:",
        "        tensors.append(None)",
        "        continue",
        *indent([*new_tensor_lines(), RECORDED]),
        "    tensors.append(tensor)",
        "return tensors" if signature.returns == ("List[Tensor]",) else "return tuple(tensors)",
    ]
