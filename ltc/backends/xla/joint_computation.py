"""A graph whose exchanges are part of one program, which the devices of all replicas run.

Replicas that are threads of one process launch it together: the last to come launches for all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ltc.backends.capabilities import ComputationCapabilities
from ltc.backends.collective_runner import current_place, running_place
from ltc.backends.xla import connections
from ltc.backends.xla.compiled_graph import XlaProgram, program_of
from ltc.backends.xla.computation import CheckedProgram, XlaComputation, XlaLaunch
from ltc.backends.xla.exchange_rows import are_all_rows, groups_of
from ltc.backends.xla.numbers import Array
from ltc.backends.xla.packed_state import unpacked
from ltc.backends.xla.placement import ReplicaMesh, mesh_of
from ltc.ir.graph import Graph

_compiling = threading.Lock()  # threads of replicas compile the same program: the first one does


class JointComputation(XlaComputation):
    """One replica's part of the program."""

    def __init__(self, graph: Graph, donated: frozenset[int]) -> None:
        self._graph, self._donated = graph, donated
        self._groups, self._known = groups_of(graph), dict[ReplicaMesh, CheckedProgram]()
        self.capabilities = ComputationCapabilities(begin=self.begin)

    def is_compiled(self) -> bool:
        """Return True if there is the program of the replica that the calling thread runs."""
        return _running_mesh() in self._known

    def compile(self) -> None:
        """Make that program, unless it is there."""
        self._program_on(_running_mesh())

    def _program_on(self, mesh: ReplicaMesh) -> CheckedProgram:
        """The program of that mesh.

        One that is known is found without the lock. Another thread may hold it for a minute, to
        compile the next program, while the other processes run this one.
        """
        found = self._known.get(mesh)
        if found is None:
            with _compiling:
                program = program_of(self._graph, mesh, self._donated)
                connections.prepare(mesh, self._groups)
            found = self._known[mesh] = CheckedProgram(program, self._graph)
        return found

    def begin(self, buffers: list[Array], scalars: list[Any]) -> tuple[list[Array], XlaLaunch]:
        mesh = _running_mesh()
        checked = self._program_on(mesh)
        program = checked.program

        def part() -> _Arguments:
            return _Arguments(unpacked(buffers, program.alone), program.numbers(scalars))

        try:
            with jax.enable_x64(True):
                connect = functools.partial(connections.connect, mesh, self._groups)
                made = _launched_with(program, mesh, running_place().position, part, connect)
            return checked.begun(made, is_sure=False)
        except jax.errors.JaxRuntimeError as error:
            raise checked.told(error, program.given(buffers)) from error


def _running_mesh() -> ReplicaMesh:
    mesh = mesh_of(running_place())
    assert mesh is not None  # there was one for the threads that the program was recorded in
    return mesh


# --- the threads of a process --------------------------------------------------------------------


@dataclass
class _Arguments:
    """One replica's arguments."""

    buffers: Sequence[Array]
    numbers: Sequence[np.ndarray]


@dataclass
class _JointLaunch:
    """One launch of a program by all replicas of this process; they agreed on it before they came.

    Attributes:
        parts: Position -> its part, as far as they are there.
        made: The results of each position.
    """

    parts: dict[int, _Arguments] = field(default_factory=dict)
    made: list[list[Array]] = field(default_factory=list)
    error: Exception | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def run(self, program: XlaProgram, mesh: ReplicaMesh, connect: Callable[[], None]) -> None:
        try:
            if self.error is None:
                connect()
                self.made = _launched(program, mesh, [self.parts[p] for p in sorted(self.parts)])
        except Exception as error:
            self.error = error
        finally:
            self.over.set()


_gathering: dict[ReplicaMesh, _JointLaunch] = {}
_lock = threading.Lock()


def _launched_with(
    program: XlaProgram,
    mesh: ReplicaMesh,
    position: int,
    part: Callable[[], _Arguments],
    connect: Callable[[], None],
) -> list[Array]:
    """Return the results of one replica; wait for the other threads' parts, or their errors."""
    made, failed = _Arguments((), ()), None
    try:
        made = part()
    except Exception as error:  # the others wait for this one
        failed = error
    with _lock:
        launch = _gathering.setdefault(mesh, _JointLaunch())
        launch.parts[position] = made
        launch.error = launch.error or failed
        is_last = len(launch.parts) == len(mesh.local)
        if is_last:
            del _gathering[mesh]  # the next launch may gather meanwhile
    if is_last:
        launch.run(program, mesh, connect)
    launch.over.wait()
    if launch.error is not None:
        raise launch.error
    return launch.made[position]


def _launched(
    program: XlaProgram, mesh: ReplicaMesh, parts: Sequence[_Arguments]
) -> list[list[Array]]:
    """Launch once for the replicas of this process; the results of each."""
    buffers: list[Any] = [None] * max(len(part.buffers) for part in parts)
    for index in program.read:
        buffers[index] = mesh.joined([part.buffers[index] for part in parts])
    groups = zip(*[part.numbers for part in parts])
    numbers = [mesh.uploaded(group) for group in groups]
    made = program.run(program.kept(buffers), program.given(buffers), [], numbers)
    return [list(results) for results in zip(*[mesh.parts(array) for array in made])]


def joint_computation(graph: Graph, donated: frozenset[int]) -> JointComputation | None:
    """The graph as one program of all replicas; None if it has no rows for all of its exchanges, or
    JAX no device for each replica.
    """
    place = current_place() if are_all_rows(graph) else None
    return None if place is None or mesh_of(place) is None else JointComputation(graph, donated)
