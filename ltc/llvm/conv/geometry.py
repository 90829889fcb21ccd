"""A convolution's shapes and attributes, and the sequence of kernels that a generator makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from ltc.llvm.emit.vectors import GeneratedKernel


@dataclass(frozen=True)
class KernelSequence:
    """Kernels that run one after the other.

    Attributes:
        scratch: Bytes of the arguments that are neither operand nor result, by their name.
    """

    kernels: tuple[GeneratedKernel, ...]
    scratch: dict[str, int]


@dataclass(frozen=True)
class Geometry:
    """A convolution: shapes [N, C, *spatial], [O, C / groups, *kernel], [N, O, *windows]."""

    operand: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def window(self) -> tuple[tuple[int, ...], ...]:
        """Return the arguments of `forward_axes` and `gradient_phases`."""
        spatial = (self.operand[2:], self.weight[2:], self.result[2:])
        return (*spatial, self.stride, self.padding, self.dilation)

    @property
    def is_pointwise(self) -> bool:
        """Return True if it is a matrix product of each image."""
        return (
            self.groups == 1 and set(self.weight[2:]) == {1} and set(self.stride) == {1}
            and set(self.padding) == {0}
        )  # fmt: skip
