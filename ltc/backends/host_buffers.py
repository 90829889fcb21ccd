"""Buffers on this machine's CPU: contiguous tensors of PyTorch's."""

from __future__ import annotations

import torch

from ltc.support.process import machine_memory


class HostBuffers:
    """The part of a `Computation` that moves values to the CPU's memory and back."""

    @staticmethod
    def upload(tensor: torch.Tensor, device: int) -> torch.Tensor:
        machine_memory.require(tensor.nbytes)
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    @staticmethod
    def download(buffer: torch.Tensor) -> torch.Tensor:
        return buffer

    @staticmethod
    def wait(device: int) -> None:
        """A launch returns when it has finished."""
