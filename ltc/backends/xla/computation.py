"""A graph that XLA has compiled, made ready to launch; and the buffers of its devices.

A launch begins and returns as soon as the device has its work, unless a check of computed values can
fail: then it waits for the program's word, in the executor's thread, and the caller goes on recording.
Checks of what the host has given, such as labels, are made ahead: see early_checks.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from ltc.backends import collective_runner
from ltc.backends.capabilities import ComputationCapabilities
from ltc.backends.xla.compiled_graph import XlaProgram, program_of
from ltc.backends.xla.fault_word import Check
from ltc.backends.xla.numbers import DTYPES, Array, as_numpy, as_tensor
from ltc.backends.xla.packed_state import TakenPack, as_array, unpacked
from ltc.backends.xla.placement import OneDevice
from ltc.errors import OutOfMemory
from ltc.ir.graph import Graph


def device_of(index: int) -> jax.Device:
    """The device of that number; the last one, where there are fewer."""
    devices = jax.local_devices()
    return devices[min(index, len(devices) - 1)]


class XlaLaunch:
    """A launch that a device has begun: it is over once its word is there."""

    def __init__(self, word: Array) -> None:
        self._word = word

    def is_finished(self) -> bool:
        return self._word.is_ready()

    def wait(self) -> None:
        try:
            self._word.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            raise as_told(error) from error


_NO_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED.*?(?:allocat\w+ (\d+(?:\.\d+)?) ?([KMGT]iB)?|$)", re.DOTALL
)
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def as_told(error: Exception) -> Exception:
    """OutOfMemory or PeerFailure for an error of XLA's that says so; others as they are."""
    found = _NO_MEMORY.search(str(error))
    if found is None:
        return collective_runner.as_told(error)
    asked = float(found[1] or 0) * _UNITS.get(found[2], 1)
    told = OutOfMemory("out of memory", int(asked))
    told.__cause__ = error
    return told


class CheckedProgram:
    """A program with the checks of one graph: equal graphs of other lines have others."""

    def __init__(self, program: XlaProgram, graph: Graph) -> None:
        self.program = program
        self._checks = [Check.of(node, graph.origins.get(node)) for node in program.checked]
        self.waits = bool(self._checks) and program.early is None

    def told(
        self, error: Exception, given: Sequence[Array], packs: Sequence[TakenPack] = ()
    ) -> Exception:
        """An error of XLA's as ltc's, which says what of the donated buffers is gone."""
        told = as_told(error)
        gone = [p for p, array in zip(self.program.positions, given) if array.is_deleted()]
        for group, (pack, _) in zip(self.program.packs, packs):
            gone += group.positions if pack.array.is_deleted() else ()
        told.overwritten = tuple(gone)  # type: ignore[attr-defined]  # see Computation.launch
        return told

    def begun(
        self, made: Sequence[Array], is_sure: bool, packs: Sequence[TakenPack] = ()
    ) -> tuple[list[Array], XlaLaunch]:
        """The outputs of a launch that was begun, and its token; raise what a check refuses.

        Args:
            is_sure: True if no check can fail.
        """
        program = self.program
        parts: list[Any] = []
        for (pack, handles), array in zip(packs, made):
            pack.replace(array)
            parts += handles
        made = [*parts, *made[len(packs) :]] if packs else made
        if self._checks and not is_sure:
            number, value = np.asarray(made[-1]).tolist()
            if number:  # nothing was written then
                error = self._checks[number - 1].error(value)
                error.restored = dict(zip(program.written, made))  # see Computation.launch
                raise error
        return list(program.outputs(made)), XlaLaunch(made[-1])


# --- programs ------------------------------------------------------------------------------------


class XlaComputation:
    """A compiled graph; its buffers are arrays of JAX's, and CPU tensors of dtypes that it lacks."""

    def __init__(self, graph: Graph, device: int, donated: frozenset[int]) -> None:
        place = OneDevice(device_of(device))
        try:
            program = program_of(graph, place, donated)
        except jax.errors.JaxRuntimeError as error:  # a GPU is asked for memory to compile with
            raise as_told(error) from error
        self._checked = CheckedProgram(program, graph)
        self.capabilities = ComputationCapabilities(
            begin=self.begin, begins_at_once=not self._checked.waits
        )

    @staticmethod
    def upload(tensor: torch.Tensor, device: int) -> Array:
        # of its own: XLA may keep the memory
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.dtype not in DTYPES:
            return own
        try:
            with jax.enable_x64(True):
                return jax.device_put(as_numpy(own), device_of(device))
        except jax.errors.JaxRuntimeError as error:
            raise as_told(error) from error

    @staticmethod
    def download(buffer: Array) -> torch.Tensor:
        buffer = as_array(buffer)
        if isinstance(buffer, torch.Tensor):
            return buffer
        try:
            # of another array of the same memory: one keeps what it has copied to the host
            return as_tensor(np.asarray(buffer.addressable_data(0)))
        except jax.errors.JaxRuntimeError as error:
            raise as_told(error) from error

    @staticmethod
    def wait(device: int) -> None:
        """Return: what `launch` runs is over, and what `begin` begins has a token."""

    def launch(self, buffers: list[Array], scalars: list[Any]) -> list[Array]:
        outputs, token = self.begin(buffers, scalars)
        token.wait()
        return outputs

    def begin(self, buffers: list[Array], scalars: list[Any]) -> tuple[list[Array], XlaLaunch]:
        """Launch, and return before the device is done, unless a check of computed values can fail."""
        program = self._checked.program
        given: Sequence[Array] = ()
        packs: list[TakenPack] = []
        try:
            with jax.enable_x64(True):
                packs = [group.taken(buffers) for group in program.packs]
                arrays = unpacked(buffers, program.alone)
                given = program.given(arrays)
                early = None if program.early is None else program.early.begun(arrays)
                made = program.run(
                    program.kept(arrays), given, [pack.array for pack, _ in packs],
                    program.numbers(scalars),
                )  # fmt: skip
            return self._checked.begun(made, early is not None and early.holds(), packs)
        except jax.errors.JaxRuntimeError as error:
            raise self._checked.told(error, given, packs) from error


def copied(buffer: Array) -> Array:
    """A second buffer with the same elements, on the same device."""
    buffer = as_array(buffer)
    if isinstance(buffer, torch.Tensor):
        return buffer.clone()
    with jax.enable_x64(True):
        return jax.numpy.copy(buffer)
