"""Connections among processes on CPUs, made before a program needs them.

JAX's processes connect in the first exchange of each group, and wait 30 seconds for each other there:
no option of JAX's changes that. A program computes before its first exchange, at a speed that differs
by processor and load. So a program of one number connects them first. They run it when each has said
that it launches, for which they have waited as for any collective of ltc's, LTC_PEER_TIMEOUT seconds.

An exchange of JAX's goes round in a circle, and has no limit of time: where a process dies, its two
neighbours hear of it, and the others wait for those. So a process that hears of a failure ends its own
connections, of which JAX gives none out: they are those that are new once JAX has connected. One that
another thread opens at that moment counts as one of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax import lax

from ltc.backends import collective_runner
from ltc.backends.xla.placement import AXIS, ReplicaMesh
from ltc.errors import PeerFailure
from ltc.support.process import tcp_connections

Groups = tuple[tuple[int, ...], ...]
_WAITS = 30  # seconds, in jaxlib
_MISSING = re.compile(r"timed out with key: \S*gloo/([\d,]+)/(\d+)")
_prepared: dict[tuple[ReplicaMesh, Groups], Any] = {}
_connected: set[tuple[ReplicaMesh, Groups]] = set()
_of_jax: list[tcp_connections.Connection] = []


def prepare(mesh: ReplicaMesh, groups: Iterable[Groups]) -> None:
    """Compile what connects the members of groups, where they are in several processes."""
    if not _is_needed(mesh):
        return
    for one in groups:
        if (mesh, one) not in _prepared:
            _prepared[mesh, one] = _compiled(mesh, one)


def connect(mesh: ReplicaMesh, groups: Iterable[Groups]) -> None:
    """Connect the members of groups that are not; every process calls this in the same launch.

    Raises:
        PeerFailure: If a process does not come.
    """
    for one in sorted(groups):
        key = mesh, one
        if key in _prepared and key not in _connected:
            parts = [np.zeros(1, np.float32) for _ in mesh.local]
            before = tcp_connections.connections()
            try:
                _prepared[key](mesh.uploaded(parts))[0].block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                raise PeerFailure(_failure(mesh, error)) from error
            finally:
                _of_jax.extend(tcp_connections.connections() - before)
            _connected.add(key)


def end() -> None:
    """End the connections, so that no process waits in an exchange with this one.

    A program that is launched after that fails where it connects, and says so.
    """
    tcp_connections.end(_of_jax)
    _of_jax.clear()
    _connected.clear()


collective_runner.ENDS.append(end)
os.register_at_fork(after_in_child=_of_jax.clear)  # they are the parent's, which a child would end


def _is_needed(mesh: ReplicaMesh) -> bool:
    return mesh.mesh.size > len(mesh.local) and mesh.local[0].platform == "cpu"


def _compiled(mesh: ReplicaMesh, groups: Groups) -> Any:
    def total(x: jax.Array) -> list[jax.Array]:
        return [lax.psum(x, AXIS, axis_index_groups=[list(group) for group in groups] or None)]

    argument = mesh.struct((1,), np.float32)
    return jax.jit(mesh.mapped(total, (argument,), [1])).lower(argument).compile()


def _failure(mesh: ReplicaMesh, error: Exception) -> str:
    """Return the text of the error for a connection that has failed."""
    found = _MISSING.search(str(error))
    if found is None:
        return f"The processes of this run did not connect for JAX's exchanges: {error}"
    ordinals = {device.id: ordinal for ordinal, device in enumerate(mesh.mesh.devices.flat)}
    missing = ordinals.get(int(found[1].split(",")[int(found[2])]), "?")
    return (
        f"Replica {missing} launched this program, and did not connect to the others for JAX's exchanges "
        f"within {_WAITS} s: its process stands still, or its host's name leads to an address that the "
        "others do not reach."
    )
