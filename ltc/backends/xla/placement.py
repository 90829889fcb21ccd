"""The places that a program runs at: one device, or the devices of all replicas at once.

A replica's value of shape [a, b] is its part of an array of shape [replicas * a, b]. A number has no
dimension to stand along: each device has its own under a sharding that names none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ltc.backends.collective_runner import Place
from ltc.backends.xla.numbers import Array

AXIS = "replica"


@dataclass(frozen=True)
class OneDevice:
    """A program of its own."""

    device: jax.Device

    def struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """The argument that a program is compiled for, where a device has it."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(self.device))

    def host_struct(self, size: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """The same of a vector that the host hands over."""
        return jax.ShapeDtypeStruct((size,), dtype)

    def mapped(self, function: Any, structs: Any, ranks: Sequence[int]) -> Any:
        """The function of all devices, given that of one; `ranks` are its results'."""
        return function


@dataclass(frozen=True)
class ReplicaMesh:
    """A program of all replicas, in the order of their ordinals; each device runs its part.

    Attributes:
        local: The devices of this process, by position.
    """

    mesh: Mesh
    local: tuple[jax.Device, ...]

    def struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, _spec(len(shape)))
        return jax.ShapeDtypeStruct(self._of_all(shape), dtype, sharding=sharding)

    def host_struct(self, size: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return self.struct((size,), dtype)

    def mapped(self, function: Any, structs: Any, ranks: Sequence[int]) -> Any:
        given = jax.tree.map(lambda one: _spec(len(one.shape)), structs)
        made = [_spec(rank) for rank in ranks]
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False
        )

    def joined(self, parts: Sequence[Array]) -> Array:
        """One array of the parts that this process's replicas have."""
        shape = self._of_all(parts[0].shape)
        sharding = NamedSharding(self.mesh, _spec(len(shape)))
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    def uploaded(self, parts: Sequence[np.ndarray]) -> Array:
        return self.joined([jax.device_put(part, to) for part, to in zip(parts, self.local)])

    def parts(self, array: Array) -> list[Array]:
        """Return the part of an array that each replica of this process has."""
        found = {shard.device: shard.data for shard in array.addressable_shards}
        return [found[device] for device in self.local]

    def _of_all(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] * self.mesh.size, *shape[1:]) if shape else ()


def _spec(rank: int) -> PartitionSpec:
    return PartitionSpec(AXIS) if rank else PartitionSpec()


@functools.lru_cache(64)  # a launch asks for it
def mesh_of(place: Place) -> ReplicaMesh | None:
    """The devices of all replicas; None where JAX does not know one for each."""
    positions = place.devices or (0,)
    if place.processes not in (1, jax.process_count()):
        return None
    chosen, local = [], []
    for process in range(place.processes):
        number = process if place.processes > 1 else jax.process_index()
        known = [device for device in jax.devices() if device.process_index == number]
        if max(positions) >= len(known):
            return None
        chosen += [known[position] for position in positions]
        if number == jax.process_index():
            local = [known[position] for position in positions]
    return ReplicaMesh(Mesh(np.array(chosen), (AXIS,)), tuple(local))
