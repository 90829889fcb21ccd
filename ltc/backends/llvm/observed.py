"""Launches that are looked at: the same kernels in the same memory, one by one, and what they leave."""

from __future__ import annotations

import copy
import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ltc.backends.interface import Observer
from ltc.backends.llvm.executable import LlvmComputation
from ltc.backends.llvm.plan import SteppedPlan
from ltc.backends.llvm.workspace import WorkBlock
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.llvm.native.kernel_cache import LoadedKernel
from ltc.llvm.native.kernel_run import WORD

_GIVEN = frozenset({ops.CONSTANT, ops.SCALAR})  # what nothing has computed


class ObservedLlvmComputation:
    """See backends/interface.py's ObservedComputation."""

    def __init__(
        self,
        stepped: SteppedPlan,
        kernels: Mapping[str, LoadedKernel],
        stages: Sequence[tuple[str, Graph]],
    ) -> None:
        self.stages = stages
        self._stepped = _Stepped(stepped, kernels)

    def launch(self, buffers: list[Any], scalars: list[Any], observer: Observer) -> list[Any]:
        return self._stepped.told_to(observer).launch(buffers, scalars)


class _Stepped(LlvmComputation):
    """A program with a run for each step."""

    def __init__(self, stepped: SteppedPlan, kernels: Mapping[str, LoadedKernel]) -> None:
        super().__init__(stepped.plan, kernels)
        self._stepped = stepped
        self._observer: Observer | None = None

    def told_to(self, observer: Observer) -> _Stepped:
        """The same for one launch, which the observer is told of."""
        twin = copy.copy(self)
        twin._observer = observer
        return twin

    def _run(self, frame: WorkBlock, block: WorkBlock, values: list[Any]) -> None:
        observer = self._observer
        assert observer is not None
        done: list[int] = []  # positions of the inputs that were written over
        for step, run in zip(self._stepped.steps, self._runs, strict=True):
            for node in filter(self._is_shown, step.reads):
                observer.reads(node, self._value(node, frame, values))
            try:
                run(self.plan, frame, block, values)
            except Exception as error:
                written = (*done, *getattr(error, "overwritten", ()))
                error.overwritten = written  # type: ignore[attr-defined]  # see Computation.launch
                raise
            done.extend(run.overwrites)
            shown = step.writes if not step.is_native else filter(self._is_shown, step.writes)
            made = {node: self._value(node, frame, values) for node in shown}
            observer.makes(made, is_reference=not step.is_native)

    def _is_shown(self, node: Node) -> bool:
        is_there = node in self._stepped.place or node in self._stepped.value
        return is_there and node.op not in _GIVEN and isinstance(node.type, TensorType)

    def _value(self, node: Node, frame: WorkBlock, values: list[Any]) -> Any:
        number = self._stepped.value.get(node, -1)
        if number >= 0 and values[number] is not None:
            return values[number]
        return self._in_memory(node, frame)

    def _in_memory(self, node: Node, frame: WorkBlock) -> torch.Tensor:
        word, offset = self._stepped.place[node]
        (address,) = struct.unpack_from("=q", frame.memory, WORD * word)
        nbytes = node.size * node.dtype.itemsize
        if not nbytes:
            return torch.empty(node.shape, dtype=node.dtype)
        memory = (ctypes.c_uint8 * nbytes).from_address(address + offset)
        return torch.frombuffer(memory, dtype=node.dtype).view(node.shape)
