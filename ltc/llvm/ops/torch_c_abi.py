"""Torch's own CPU kernels, called from a program by torch's stable C functions.

A call that takes tensors, numbers, truth values, dtypes and strings goes through the dispatcher:
operands are tensors around the program's buffers, results are copied into them.  What the dispatcher
does not take (Scalar arguments, generators, arguments that are written to), or takes and then finds
to be of another type (lists, in torch 2.13), has no kernel here.  A call that fails sets its fault,
and the reference then finds torch's own error.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import torch

from ltc.ir import ops
from ltc.ir.extern_call import Hole, Template
from ltc.ir.loop_nest import Product, strides_of
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.llvm.compiler import symbols
from ltc.llvm.emit.builder import ATTRIBUTES, opening
from ltc.llvm.emit.kernel_code import KernelCode, head_of, opened
from ltc.llvm.native.kernel_run import Fault
from ltc.support.sizes.marks import is_symbolic
from ltc.support.torch_private import schema_of_overload

# c10::ScalarType, which the C functions number dtypes by.
SCALAR_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4,
    torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.complex64: 9,
    torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
_CELLS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}


class _Refused(Exception):
    """An argument that the dispatcher does not take from C."""


def can_call(node: Node) -> bool:
    """Return True if an extern node can be called without Python."""
    template: Template = node.attr("template")
    types = [*node.type, *[n.type for n in node.inputs]]
    plain = all(isinstance(t, TensorType) and t.dtype in SCALAR_TYPES and t.size for t in types)
    if any(n.op is ops.BARRIER for n in node.inputs):
        return False  # the kernel would read what is before it, and the reference asks for itself
    if not plain or template.seed is not None or template.mutated or not all(template.present):
        return False
    if not all(map(symbols.has_symbol, symbols.SHIM_NAMES)):
        return False
    try:
        _Call(node)
    except (_Refused, AttributeError):
        return False
    return True


def call_codes(product: Product) -> list[KernelCode]:
    operands = tuple(access.node for access in product.operands)
    kept = [(k, node) for k, node in enumerate(product.results) if node is not None]
    text = _Call(product.node).text([k for k, _ in kept])
    nodes = (*operands, *[node for _, node in kept], Fault(product.node))
    return [KernelCode(text, nodes, 1)]


@functools.cache
def _build_version() -> int:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return major << 56 | minor << 48


class _Call:
    """The text of one call.

    arguments  the schema's, each as the lines that leave its word in a register
    """

    def __init__(self, node: Node):
        self.node, self.template = node, node.attr("template")
        self.lines: list[str] = []
        self.globals: list[str] = []
        self.count = 0
        schema = schema_of_overload(_overload(self.template.overload))
        if not all(str(r.type) == "Tensor" for r in schema.returns):
            raise _Refused
        if len(schema.returns) != len(node.type):
            raise _Refused
        self.words = [self._argument(k, a) for k, a in enumerate(schema.arguments)]
        self.slots = max(len(self.words), len(schema.returns))

    def text(self, kept: list[int]) -> str:
        """The module; `kept` are the results that go into buffers, behind the operands."""
        name, _, overload = self.template.overload.partition(".")
        op, variant = self._string(name), self._string(overload)
        first = len(self.node.inputs)
        pointers = first + len(kept) + 1
        for k, word in enumerate(self.words):
            self._line(f"store i64 {word}, ptr %s{k}")
        version = _build_version()
        code = self._value(
            f"call i32 @torch_call_dispatcher(ptr {op}, ptr {variant}, ptr %stack, i64 {version})"
        )
        self._line(f"%failed = icmp ne i32 {code}, 0\n  br i1 %failed, label %fail, label %done")
        self._line("\ndone:")
        bad = "0"
        for k, type in enumerate(self.node.type):
            made = self._value(f"load ptr, ptr %s{k}")
            if k in kept:
                target = self._tensor(f"%p{first + kept.index(k)}", type)
                wrong = self._value(f"call i32 @aoti_torch_copy_(ptr {target}, ptr {made}, i32 0)")
                bad = self._value(f"or i32 {bad}, {wrong}")
                bad = self._value(f"or i32 {bad}, {self._is_of_other_size(made, type)}")
                self._line(f"call i32 @aoti_torch_delete_tensor_object(ptr {target})")
            self._line(f"call i32 @aoti_torch_delete_tensor_object(ptr {made})")
        self._line(f"%unfit = icmp ne i32 {bad}, 0\n  br i1 %unfit, label %fail, label %end")
        slots = "".join(
            f"  %s{k} = getelementptr i64, ptr %stack, i64 {k}\n" for k in range(self.slots)
        )
        body = "\n".join(f"  {line}" if line[0] != "\n" else line for line in self.lines)
        body, sizes = opened(body, 0)
        return (
            head_of(sizes) + "".join(self.globals) + _DECLARATIONS
            + opening("kernel", pointers, len(sizes))
            + f"  %stack = alloca [{self.slots} x i64]\n  %handle = alloca ptr\n{slots}{body}\n"
            f"fail:\n  store i64 1, ptr %p{pointers - 1}\n  br label %end\nend:\n  ret void\n}}\n"
            f"{ATTRIBUTES}"
        )  # fmt: skip

    def _is_of_other_size(self, made: str, type: TensorType) -> str:
        """Return whether a copy of the result would repeat it, or its size cannot be read."""
        failed = self._value(f"call i32 @aoti_torch_get_numel(ptr {made}, ptr %handle)")
        size = self._value("load i64, ptr %handle")
        other = self._value(f"icmp ne i64 {size}, {type.size}")
        return self._value(f"or i32 {failed}, {self._value(f'zext i1 {other} to i32')}")

    # --- arguments, as the 64-bit words that stand for them --------------------------------------

    def _argument(self, position: int, argument: Any) -> str:
        given = dict(self.template.kwargs)
        if position < len(self.template.args):
            value = self.template.args[position]
        elif argument.name in given:
            value = given[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
            value = tuple(value) if isinstance(value, list) else value
        else:
            raise _Refused
        # real_type tells a ScalarType from the int that it is in Python.
        return self._word(value, str(getattr(argument, "real_type", argument.type)))

    def _word(self, value: Any, type: str) -> str:
        if type.startswith("Optional["):
            if value is None:
                return "0"
            return self._present(self._word(value, type[9:-1]))
        if isinstance(value, Hole):
            return self._operand(value, type)
        maker = _CONSTANTS.get(type)
        if maker is None:
            raise _Refused
        return maker(self, value)

    def _operand(self, hole: Hole, type: str) -> str:
        node, pointer = self.node.inputs[hole.operand], f"%p{hole.operand}"
        if type == "Tensor" and not hole.number:
            return self._value(f"ptrtoint ptr {self._tensor(pointer, node.type)} to i64")
        type = "int" if type == "SymInt" else type
        if not hole.number or _CELLS.get(type) != node.dtype:
            raise _Refused
        if type == "bool":
            return self._value(f"zext i8 {self._value(f'load i8, ptr {pointer}')} to i64")
        return self._value(f"load i64, ptr {pointer}")  # a double goes by its bits

    def _tensor(self, pointer: str, type: TensorType) -> str:
        """A tensor around a buffer."""
        sizes, strides = self._numbers(type.shape), self._numbers(strides_of(type.shape))
        self._line(
            f"call i32 @aoti_torch_create_tensor_from_blob(ptr {pointer}, i64 {len(type.shape)}, "
            f"ptr {sizes}, ptr {strides}, i64 0, i32 {SCALAR_TYPES[type.dtype]}, i32 0, i32 0, "
            f"ptr %handle)"
        )
        return self._value("load ptr, ptr %handle")

    def _present(self, word: str) -> str:
        """An optional that is there: the dispatcher frees the word that it points to."""
        memory = self._value("call ptr @malloc(i64 8)")
        self._line(f"store i64 {word}, ptr {memory}")
        return self._value(f"ptrtoint ptr {memory} to i64")

    def text_word(self, value: Any) -> str:
        if not isinstance(value, str):
            raise _Refused
        size = len(value.encode())
        self._line(
            f"call i32 @torch_new_string_handle(ptr {self._string(value)}, i64 {size}, ptr %handle)"
        )
        return self._value(f"ptrtoint ptr {self._value('load ptr, ptr %handle')} to i64")

    # --- text ------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self.lines.append(text)

    def _value(self, text: str) -> str:
        self.count += 1
        self._line(f"%v{self.count} = {text}")
        return f"%v{self.count}"

    def _global(self, type: str, value: str) -> str:
        name = f"@constant{len(self.globals)}"
        self.globals.append(f"{name} = private unnamed_addr constant {type} {value}\n")
        return name

    def _numbers(self, numbers: tuple[int, ...]) -> str:
        if not numbers:
            return "null"
        if is_symbolic(numbers):
            return self._stored(numbers)
        return self._global(
            f"[{len(numbers)} x i64]", "[" + ", ".join(f"i64 {n}" for n in numbers) + "]"
        )

    def _stored(self, numbers: tuple[int, ...]) -> str:
        """Return where the numbers are put as it runs: some of them are arguments."""
        memory = self._value(f"alloca [{len(numbers)} x i64]")
        for k, number in enumerate(numbers):
            place = self._value(f"getelementptr i64, ptr {memory}, i64 {k}")
            self._line(f"store i64 {number}, ptr {place}")
        return memory

    def _string(self, text: str) -> str:
        data = text.encode() + b"\0"
        return self._global(f"[{len(data)} x i8]", 'c"' + "".join(f"\\{x:02X}" for x in data) + '"')


def _overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _integer(call: _Call, value: Any) -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _Refused
    return str(value)


def _truth(call: _Call, value: Any) -> str:
    if not isinstance(value, bool):
        raise _Refused
    return str(int(value))


def _double(call: _Call, value: Any) -> str:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _Refused
    return str(struct.unpack("<q", struct.pack("<d", value))[0])


def _dtype(call: _Call, value: Any) -> str:
    if value not in SCALAR_TYPES:
        raise _Refused
    return str(SCALAR_TYPES[value])


_CONSTANTS: dict[str, Callable[[_Call, Any], str]] = {
    "int": _integer, "SymInt": _integer, "float": _double, "bool": _truth, "ScalarType": _dtype,
    "str": _Call.text_word,
}  # fmt: skip

_DECLARATIONS = """
declare i32 @torch_call_dispatcher(ptr, ptr, ptr, i64)
declare i32 @aoti_torch_create_tensor_from_blob(ptr, i64, ptr, ptr, i64, i32, i32, i32, ptr)
declare i32 @aoti_torch_delete_tensor_object(ptr)
declare i32 @aoti_torch_copy_(ptr, ptr, i32)
declare i32 @aoti_torch_get_numel(ptr, ptr)
declare i32 @torch_new_string_handle(ptr, i64, ptr)
declare ptr @malloc(i64)
"""
