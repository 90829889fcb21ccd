"""The lines of a generated kernel for a call that is not recorded: torch's own kernel runs.

Operands are computed values by then.  What is written to is owned first, or copied; what is made
becomes a new tensor.  Whatever refuses, or does more than that, goes the thorough way.
"""

from __future__ import annotations

import torch

from ltc.backends.plain_dispatch import IS_PLAIN_NOW
from ltc.device.recording.run_now import ImmediateKernel, how_to_run
from ltc.device.recording.signature import (
    DEVICE,
    GENERATOR,
    OPTIONAL_TENSOR,
    OPTIONAL_TENSORS,
    TENSOR,
    TENSORS,
    Argument,
    Signature,
)

_TENSORS = frozenset({TENSORS, OPTIONAL_TENSORS})

RECORDED = (
    "recorder.live.append(state)"  # what follows a new tensor's lines; or, of a call that ran:
)
_RAN = "session.made_states(ref(state))"

# --- what recorded calls have as well -------------------------------------------------------------


def indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def name_of(position: int, argument: Argument) -> str:
    return argument.name if argument.keyword_only else f"a{position}"


def call_slow(arguments: tuple[Argument, ...]) -> str:
    parts = [f"{a.name}={a.name}" if a.keyword_only else f"a{i}" for i, a in enumerate(arguments)]
    return f"slow({', '.join(parts)})"


def first_operand(signature: Signature) -> int | None:
    """The position of the argument whose recording it is; None of a call that starts from nothing."""
    arguments = signature.arguments
    return next((i for i, a in enumerate(arguments) if a.kind in (TENSOR, TENSORS)), None)


def recorder_of(signature: Signature) -> str:
    """Return the text that gives the recorder, once the operands' values are there."""
    arguments, first = signature.arguments, first_operand(signature)
    if first is None:
        assert signature.device is not None
        return f"recorder_named({name_of(signature.device, arguments[signature.device])})"
    return (
        f"value{first}[0].recorder"
        if arguments[first].kind == TENSORS
        else f"value{first}.recorder"
    )


def errors_of(signature: Signature) -> str:
    """Return the errors raised up to there by operands that need the slow path."""
    first = first_operand(signature)
    is_list = first is not None and signature.arguments[first].kind == TENSORS
    return "(*other_operand, IndexError)" if is_list else "other_operand"


def conditions(signature: Signature) -> str:
    """Return the conditions for the slow path: a user's generator, another device or layout."""
    conditions, has_operand = [], first_operand(signature) is not None
    for name, argument in [(name_of(i, a), a) for i, a in enumerate(signature.arguments)]:
        if argument.kind == GENERATOR:
            conditions.append(f" and {name} is None")
        elif argument.kind == DEVICE and has_operand:  # else the recording is that of the device
            conditions.append(f" and ({name} is None or {name} == recorder.device.torch_device)")
        elif argument.name == "layout":
            conditions.append(f" and ({name} is None or {name} is strided)")
    return "".join(conditions)


_POINTWISE_TOO = frozenset({"aten::floor_divide", "aten::floor_divide_"})  # torch does not say so


def may_be_number(signature: Signature, i: int) -> bool:
    """Return True if a number may stand where the schema has a tensor: not as the first of them."""
    arguments = signature.arguments
    is_pointwise = torch.Tag.pointwise in signature.overload.tags or signature.op in _POINTWISE_TOO
    seen_tensor = any(a.kind == TENSOR for a in arguments[:i])
    return is_pointwise and seen_tensor and not arguments[i].written


def new_tensor_lines(shape: str = "value.shape", dtype: str = "value.dtype") -> list[str]:
    """Lines that make `tensor`, which holds `value`."""
    return [
        f"tensor = recorder.new_tensor({shape}, {dtype})",
        "storage_of(tensor).lazy = state = State()",
        "state.value = value",
        "state.device = recorder.device",
        "state.buffer = state.views = state.base = None",
    ]


def returned_written(signature: Signature) -> str:
    """Return the return statement of a kernel that returns the arguments it wrote to."""
    if not signature.returns:
        return "return"
    names = [name_of(i, signature.arguments[i]) for i in signature.written]
    return f"return {names[0] if len(signature.returns) == 1 else ', '.join(names)}"


# --- the call -------------------------------------------------------------------------------------


def at_once_lines(signature: Signature, key: list[str], scalars: list[str]) -> list[str]:
    """Return the lines before the slow path; none if only that path can run the overload.

    Args:
        key: the parts of the key of a call that is followed.
        scalars: lines that put its numbers on the recording's list.
    """
    kernel = how_to_run(signature)
    if not kernel.runs_here or torch.Tag.inplace_view in signature.overload.tags:
        return []
    if any(signature.arguments[i].kind == OPTIONAL_TENSORS for i in signature.written):
        return []
    is_view = signature.is_view and not kernel.writes
    scalars = [line.replace("recorder.scalars.", "session.numbers.") for line in scalars]
    lines = _view_lines(signature) if is_view else _result_lines(signature, kernel)
    return [
        f"elif recorder.thread == get_ident() and {IS_PLAIN_NOW}"
        f"{conditions(signature)}{_all_here(signature)}{_may_be_noted(signature, kernel)}:",
        "    entry = session.cursor",
        f"    if entry.key == ({', '.join(['overload', *_noted_key(signature, key)])},):",
        *indent(indent(_call_lines(signature, kernel))),
        "        session.calls += 1",
        *indent(indent(_count_lines(signature))),
        *indent(indent(_read_lines(signature, kernel))),
        "        if session.calls > session.next_look:",
        "            session.forget_dead()",
        "        session.move_along(entry)",
        *indent(indent(scalars)),
        *indent(indent(lines)),
    ]


def _count_lines(signature: Signature) -> list[str]:
    """The line that counts the tensors of lists that the call writes to; none where it has none."""
    lists = [i for i in signature.written if signature.arguments[i].kind == TENSORS]
    lengths = " + ".join([f"len(value{i})" for i in lists])
    return [f"session.written_in_lists += max(0, {lengths} - 1)"] if lists else []


def _noted_key(signature: Signature, key: list[str]) -> list[str]:
    """The parts of the key, with noted values in place of computed ones."""
    return [_noted_part(signature, part) for part in key]


def _noted_part(signature: Signature, part: str) -> str:
    number = part.removeprefix("value")
    if number == part or not number.isdigit():
        return part
    i = int(number)
    kind = signature.arguments[i].kind
    if kind == TENSORS:
        return f"[v.noted for v in {part}]"
    if kind == OPTIONAL_TENSORS:
        return f"[None if v is None else v.noted for v in {part}]"
    if kind == OPTIONAL_TENSOR:
        return f"(None if {part} is None else {part}.noted)"
    if may_be_number(signature, i):
        return f"({part} if {part}.__class__ is type else {part}.noted)"
    return f"{part}.noted"


def _call_lines(signature: Signature, kernel: ImmediateKernel) -> list[str]:
    """Lines that call; what is pending in another thread has no tensor here."""
    arguments = signature.arguments
    operands = [_operand(i, a, kernel) for i, a in enumerate(arguments)]
    slow = ["except refused:", f"    return {call_slow(arguments)}"]
    if not kernel.writes_lists:
        call = f"    made = call({', '.join(operands)})"
        return ["try:", *indent(_own_lines(signature)), call, *slow]
    # some of it may have been written when it raises: it must not be called again
    names = [f"given{i}" for i in range(len(arguments))]
    values = [given.removeprefix(f"{a.name}=") for given, a in zip(operands, arguments)]
    given = [f"    {name} = {value}" for name, value in zip(names, values)]
    passed = [f"{a.name}={n}" if a.keyword_only else n for n, a in zip(names, arguments)]
    call = f"made = call({', '.join(passed)})"
    return ["try:", *indent(_own_lines(signature)), *given, *slow, call]


def _may_be_noted(signature: Signature, kernel: ImmediateKernel) -> str:
    """A condition: a call whose result's shape is read ends what is noted."""
    if not kernel.may_read:
        return ""
    given = "".join(f"{name_of(i, a)}, " for i, a in enumerate(signature.arguments))
    return f" and (session.notes is None or not runnable.reads(({given})))"


def _read_lines(signature: Signature, kernel: ImmediateKernel) -> list[str]:
    """Lines for a call that reads what is there, as `item` does, to know its result's shape."""
    if not kernel.may_read:
        return []
    given = "".join(f"{name_of(i, a)}, " for i, a in enumerate(signature.arguments))
    return [f"if runnable.reads(({given})):", "    session.look_at_values(signature.name)"]


def _operand(i: int, argument: Argument, kernel: ImmediateKernel) -> str:
    """Return the text of the argument for torch's own kernel."""
    name = name_of(i, argument)
    given, kind = name, argument.kind
    if argument.written:
        given = f"own{i}"
    elif kind == DEVICE:
        given = "on_cpu"
    elif kind in _TENSORS:
        any_strides = f"tensors_here(recorder, value{i})"
        given = any_strides if kernel.any_strides else _contiguous_tensors(i)
    elif kind in (TENSOR, OPTIONAL_TENSOR):
        given = f"value{i}.tensor" if kernel.any_strides else f"contiguous(value{i}.tensor)"
        if may_be_number(kernel.signature, i):
            given = f"({name} if value{i}.__class__ is type else {given})"
        elif kind == OPTIONAL_TENSOR:
            given = f"(None if value{i} is None else {given})"
    return f"{name}={given}" if argument.keyword_only else given


def _contiguous_tensors(i: int) -> str:
    return f"[x if x is None else contiguous(x) for x in tensors_here(recorder, value{i})]"


def _all_here(signature: Signature) -> str:
    """A condition: each operand was computed in this recording, and not in another thread's."""
    conditions = []
    first = first_operand(signature)
    for i, argument in enumerate(signature.arguments):
        if i == first:
            continue  # it is this one's recording
        is_here = f"value{i}.recorder is recorder"
        if may_be_number(signature, i) and argument.kind == TENSOR:
            conditions.append(f" and (value{i}.__class__ is type or {is_here})")
        elif argument.kind == OPTIONAL_TENSOR:
            conditions.append(f" and (value{i} is None or {is_here})")
        elif argument.kind == TENSOR:
            conditions.append(f" and {is_here}")
    return "".join(conditions)


# --- what it writes to ----------------------------------------------------------------------------


def _own_lines(signature: Signature) -> list[str]:
    """Lines that make `own<i>` of each written argument: tensors that the kernel may write to."""
    lines: list[str] = []
    for i in signature.written:
        argument = signature.arguments[i]
        own, condition = _own(signature, i), argument.written_with
        if condition is not None:
            own = f"{own} if {condition} is not None else {_contiguous_tensors(i)}"
        lines.append(f"own{i} = {own}")
    return lines


def _own(signature: Signature, i: int) -> str:
    kind = signature.arguments[i].kind
    if kind == TENSORS:
        return f"session.own_all(states{i})"
    read = [
        f", *value{k}" if a.kind in _TENSORS else f", value{k}"
        for k, a in signature.tensors
        if k != i
    ]
    own = f"session.own(state{i}{''.join(read)})"
    return own if kind == TENSOR else f"None if value{i} is None else {own}"


def _hold_lines(signature: Signature, i: int) -> list[str]:
    """Lines that let a written argument hold what the kernel has left in `own<i>`."""
    argument = signature.arguments[i]
    if argument.kind == TENSORS:
        lines = [
            f"for state, own, noted in zip(states{i}, own{i}, results):",
            "    hold(session, state, own, noted)",
        ]
    else:
        lines = [f"hold(session, state{i}, own{i}, next(results))"]
    condition = argument.written_with
    if argument.kind == OPTIONAL_TENSOR:
        condition = f"value{i}"
    return lines if condition is None else [f"if {condition} is not None:", *indent(lines)]


# --- what it makes --------------------------------------------------------------------------------


def _result_lines(signature: Signature, kernel: ImmediateKernel) -> list[str]:
    lines = [line for i in signature.written for line in _hold_lines(signature, i)]
    if lines or signature.returns != ("Tensor",):
        lines = ["results = iter(entry.call.results)", *lines]
    if signature.returns_written:
        return [*lines, returned_written(signature)]
    if signature.returns == ("Tensor",):
        noted = "next(results)" if lines else "entry.value"
        alias = ["made = alias(made)"] if kernel.may_return_operand else []
        return [*lines, *alias, *_computed_lines("made", noted), "return tensor"]
    return [
        *lines,
        "tensors = []",
        "for one in made:",
        "    noted = next(results)",
        "    if one is None:",
        "        tensors.append(None)",
        "        continue",
        *indent(_computed_lines("one", "noted")),
        "    tensors.append(tensor)",
        "return tensors" if signature.returns == ("List[Tensor]",) else "return tuple(tensors)",
    ]


def _computed_lines(made: str, noted: str) -> list[str]:
    """Lines that make `tensor`, which holds what a kernel has made: `computed` and `wrap`."""
    return [
        f"dtype = {made}.dtype",
        "if dtype.is_complex:",
        f"    {made} = {made}.resolve_conj()",
        "value = new_object(ComputedValue)",
        f"value.recorder, value.tensor, value.noted = recorder, {made}, {noted}",
        *new_tensor_lines(f"{made}.shape", "dtype"),
        _RAN,
    ]


def _view_lines(signature: Signature) -> list[str]:
    arguments = signature.arguments
    names = [name_of(i, a) for i, a in enumerate(arguments)]
    if signature.returns != ("Tensor",):
        return [
            "values = [computed(recorder, x, n) for x, n in zip(made, entry.call.results)]",
            f"links = links_of(signature, link_of(signature, [{', '.join(names)}], made), len(made))",
            "return link_views(recorder, a0, values, links)",
        ]
    link = f"(overload, ({''.join(f'{name}, ' for name in names[1:])}), no_keywords, None)"
    if any(a.keyword_only for a in arguments) or signature.op == "aten::expand":
        link = f"(*link_of(signature, [{', '.join(names)}], made), None)"
    return [f"return link_view(recorder, a0, computed(recorder, made, entry.value), {link})"]
