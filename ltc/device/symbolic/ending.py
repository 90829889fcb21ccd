"""The run of a recording along a path of symbols."""

from __future__ import annotations

from typing import Any

from ltc.aten.call import CallResult
from ltc.device.policy import MAX_VARIANTS
from ltc.device.symbolic.path_selection import give_up
from ltc.runtime.compile import ProgramBinding, program_for
from ltc.runtime.program import Program
from ltc.runtime.program_of_sizes import ProgramOfSizes


def program_of_sizes(
    leaf: Any, outputs: tuple[CallResult, ...], replaced: dict[int, int], device: int
) -> ProgramOfSizes:
    """Return what runs a path of symbols that ends at the entry `leaf`, whatever its sizes are."""
    path, position = leaf.of
    key = position, outputs, tuple(replaced.items())
    known: ProgramOfSizes | None = path.ends.get(key)
    if known is None:

        def derive(values: Any, symbolic: bool) -> Any:
            return path.calls_at(values, symbolic, position, outputs)

        known = path.ends[key] = ProgramOfSizes(derive, replaced, device, MAX_VARIANTS)
    return known


def ask_for_sizes(
    leaf: Any, outputs: tuple[CallResult, ...], replaced: dict[int, int], device: int
) -> ProgramOfSizes:
    """Have a program made for the path's present sizes and others; return what will have it."""
    path, _ = leaf.of
    known = program_of_sizes(leaf, outputs, replaced, device)
    known.ask(path.values)
    give_up_if_refused(path)
    return known


def program_at_sizes(recorder: Any, ended: Any) -> tuple[Program, ProgramBinding]:
    """Return the program of the recording's sizes; without one for all sizes, one for these alone.

    Args:
        ended: The result of its end.
    """
    path, position = recorder.last.of
    device = recorder.device.index
    known = program_of_sizes(recorder.last, ended.outputs, ended.replaced, device)
    program = known.at(path.values)
    if program is not None and known.binding is not None:
        return program, known.binding
    give_up_if_refused(path)
    _, calls, values = path.calls_at(path.values, False, position, ended.outputs)
    return program_for(None, lambda: calls, values, device, ended.replaced)


def give_up_if_refused(path: Any) -> None:
    """Give a path of symbols up of which no end has a program, nor will have one."""
    ends = path.ends.values()
    refusals = [end.refusal for end in ends if end.refusal]
    if refusals and not any(end.has_variants for end in ends):
        give_up(path, refusals[-1])


def leave_to_itself(recorder: Any, leaf: Any) -> None:
    """Sizes that have come several times in succession are noted for themselves the next time."""
    path, _ = leaf.of
    if path.note_end():
        path.place.prefer_others()
        for behind in (leaf, recorder.ended):
            if behind.follow is path.entries[0]:
                behind.follow = path.place.next
            recorder.policy.note_again(behind.ended_path)
