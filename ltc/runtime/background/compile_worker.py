"""The process that compiles while the one that started it goes on: reads graphs, keeps programs.

A request is a line of JSON, but for what a copy was made for; the answer is a line with its number.
The program itself goes through the disk cache, where the other process finds it as it finds those
of earlier runs.  It runs with a low priority, and ends when its input does.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import IO, Any

from ltc import config
from ltc.runtime.background.graph_record import graph_of_record
from ltc.runtime.graph_compiler import compile_and_keep, resizable_and_keep
from ltc.support.process import purpose
from ltc.support.sizes.as_json import fill_trace, loaded
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import SizeTrace

FIRST = 0  # the number of what a copy was made for
# Beside programs that keep all processors busy it gets a quarter of one. At the lowest priority, 19, it gets a
# hundredth, and a training whose loaders do so went on with slow first steps for minutes.
NICENESS = 5


def serve(requests: IO[str], answers: IO[str], first: Callable[[], object] | None = None) -> None:
    """Answer every request; one that fails is answered too, and leaves nothing on the disk.

    Args:
        first: Compiles a program and keeps it: what this process, a copy, has in its memory.
    """
    os.nice(NICENESS)
    purpose.only_compiles = True
    if first is not None:
        _answer(FIRST, first, answers)
    for line in requests:
        trace = SizeTrace()
        request = loaded(line, trace)
        _answer(request["number"], functools.partial(_keep, request, trace), answers)


def _answer(number: int, keep: Callable[[], object], answers: IO[str]) -> None:
    try:
        with config.override(LTC_PROGRESS=0):  # nobody waits
            keep()
    except Exception as error:
        answers.write(json.dumps([number, f"{type(error).__name__}: {error}"]) + "\n")
    else:
        answers.write(json.dumps([number, None]) + "\n")


def _keep(request: dict[str, Any], trace: SizeTrace) -> None:
    name, device, donated = request["name"], request["device"], frozenset(request["donated"])
    if request["sizes"] is None:
        compile_and_keep(name, graph_of_record(request["graph"]), device, donated)
        return
    fill_trace(trace, request["sizes"])
    with tracing(trace):
        resizable_and_keep(name, graph_of_record(request["graph"]), device, donated, trace)
