"""How a recording along a path of symbols is run."""

from __future__ import annotations

from typing import Any

from ltc.device.symbolic.going_on import give_up
from ltc.runtime.compile import ProgramBinding, program_for
from ltc.runtime.program import Program
from ltc.runtime.symbolic.program_of_sizes import ProgramOfSizes


def program_at_sizes(recorder: Any, ended: Any) -> tuple[Program, ProgramBinding]:
    """The program of the recording's sizes; where there is none for all sizes, one for these alone.

    ended  what its end came to
    """
    path, position = recorder.last.of
    device = recorder.device.index
    key = position, ended.outputs, tuple(ended.replaced.items())
    known = path.ends.get(key)
    if known is None:
        outputs = ended.outputs

        def derive(values: Any, symbolic: bool) -> Any:
            return path.calls_at(values, symbolic, position, outputs)

        known = path.ends[key] = ProgramOfSizes(derive, ended.replaced, device)
    reads = recorder.cut_here is not None
    program = known.at(path.values, not recorder.short_reads.may_need_no_program(position, reads))
    if program is not None:
        return program, known.binding
    if known.refusal and not any(end.has_variants for end in path.ends.values()):
        give_up(path, known.refusal)
    _, calls, values = path.calls_at(path.values, False, position, ended.outputs)
    return program_for(None, lambda: calls, values, device, ended.replaced)


def leave_to_itself(recorder: Any) -> None:
    """SymbolSizes that have come several times in succession are recorded for themselves the next time."""
    last = recorder.last
    path, _ = last.of
    if path.note_end():
        path.give_way()
        if last.follow is path.entries[0]:
            last.follow = path.place.next
