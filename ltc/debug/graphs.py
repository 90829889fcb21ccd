"""Show pending work stage by stage, as text: calls, graph, kernels, machine code.

    import ltc.debug.graphs as graphs

    y = (x * 2).relu().sum()
    print(graphs.text(y))                       # the primitives that compute y
    print(graphs.text(y, stage="kernels"))      # the loops they become
    print(graphs.text(y, stage="assembly"))     # the instructions

Nothing is run, and nothing that is pending changes. LTC_DUMP=kernels,llvm prints the same stages of
every step when it is compiled.
"""

from __future__ import annotations

import torch

from ltc.aten.call import Call, CallResult, Numbering
from ltc.aten.expansion import expand
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.device.recording.recorder import Recorder
from ltc.device.recording.sync import exclusively, value_of
from ltc.device.recording.tensors import current_device, state_of
from ltc.passes import pipeline
from ltc.runtime.compile import live_calls
from ltc.runtime.dump import text as graph_text
from ltc.runtime.transfers import capabilities
from ltc.support.reference_counts import IN_TWO_LISTS, reference_counts


def stages() -> tuple[str, ...]:
    """The names that `text` takes, in the order of a step's way through ltc."""
    own = tuple(p.name for p in pipeline.PIPELINE)
    return ("recorded", "expanded", *own, *capabilities().stages)


def text(*tensors: torch.Tensor, stage: str = "") -> str:
    """Return the pending computation of lazy tensors, as one stage shows it.

    A tensor whose value is already there shows as an input.

    Args:
        tensors: On one device; without any, everything that the next mark_step of the current
            device would compute.
        stage: One of `stages()`; by default the graph that the backend is given.

    Raises:
        ValueError: If there is no such stage.
        NotLazyTensor: If a tensor is not lazy.
    """
    known = stages()
    stage = stage or pipeline.PIPELINE[-1].name
    if stage not in known:
        raise ValueError(f"There is no stage called {stage!r}; there are {', '.join(known)}.")
    states = [state_of(tensor) for tensor in tensors]
    recorder = (states[0].device if states else current_device()).recorder()

    def calls_and_outputs() -> tuple[list[Call], tuple[CallResult, ...]]:
        if recorder.immediate is not None:
            return [], ()  # all that was called has run
        values = [value_of(state) for state in states] or _pending(recorder)
        outputs = tuple(dict.fromkeys(values))
        return live_calls(recorder.path(), outputs), outputs

    calls, outputs = exclusively(recorder, calls_and_outputs)
    with PlainDispatch():  # as where they are compiled
        return _shown(stage, calls, outputs)


def recorded(calls: list[Call]) -> str:
    """Recorded calls, one a line, each with the line of the user's that asked for it."""
    numbers: dict[CallResult, str] = {}
    rows = []
    for call in calls:
        operands = ", ".join(
            [_operand(one, numbers) for one in call.args]
            + [f"{key}={_operand(one, numbers)}" for key, one in call.kwargs.items()]
        )
        made = [value for value in call.results if value is not None]
        for value in made:
            numbers[value] = f"%{len(numbers)}"
        types = ", ".join(f"{numbers[v]}: {v.dtype}{list(v.shape)}" for v in made)
        rows.append((f"{types} = {call.name}({operands})", call.line))
    width = max((len(row) for row, _ in rows), default=0) + 4
    return "\n".join(f"{row:<{width}}{line}".rstrip() for row, line in rows)


def _operand(operand, numbers: dict[CallResult, str]) -> str:
    if isinstance(operand, CallResult):
        return numbers[operand]
    if isinstance(operand, list | tuple):
        return f"[{', '.join(_operand(one, numbers) for one in operand)}]"
    return repr(operand)


def _pending(recorder: Recorder) -> list[CallResult]:
    """Return the values that the next mark would compute: those still held; of views, their base's."""
    recorder.catch_up()
    found = []
    states = [*recorder.live, *recorder.bound]
    for state, references in zip(states, reference_counts(states)):
        held = references > IN_TWO_LISTS  # the recorder's and this one
        value = state.value
        if value is None or value.recorder is not recorder:
            continue
        if held and state.buffer is None and state.base is None:
            found.append(value)
    return found


def _shown(stage: str, calls: list[Call], outputs: tuple[CallResult, ...]) -> str:
    if stage == "recorded":
        return recorded(calls)
    graph = expand(calls, outputs, Numbering(calls))
    if stage == "expanded":
        return graph_text(graph)
    for one in pipeline.PIPELINE:
        graph = one.run(graph)
        if one.name == stage:
            return graph_text(graph)
    explain = capabilities().explain
    assert explain is not None  # whoever names stages of its own explains them
    return next(shown for name, shown in explain(graph) if name == stage)
