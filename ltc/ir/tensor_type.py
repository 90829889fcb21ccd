"""The type of a node's result: a dtype and a shape, and nothing about its place."""

from __future__ import annotations

from typing import NamedTuple

import torch

SHORT_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def dtype_name(dtype: torch.dtype) -> str:
    """`f32` for torch.float32; a dtype without a short name keeps torch's."""
    return SHORT_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


class TensorType(NamedTuple):
    """dtype and shape of one tensor; prints as `f32[64,784]`."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


# What an op with several results has for a type; an op with one has a TensorType.
TupleType = tuple[TensorType, ...]


def type_text(type: TensorType | TupleType) -> str:
    if isinstance(type, TensorType):
        return str(type)
    return f"({', '.join(map(str, type))})"
