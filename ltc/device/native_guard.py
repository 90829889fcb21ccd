"""The device guard's answers without Python.

C++ asks a device's guard which device and stream are current, twice or more for each operation that
autograd knows of: some sixty times in a small training step.  torch's guard for devices written in
Python has one answer, device 0, but finds it by calling a Python method by its name, for half a
microsecond each time: a tenth of that step.  So the guard gets a table of methods of its own, in
which those that ask Python are three instructions that return the same.

Only where all is as it is known to be: a torch that was looked at (torch_api.GUARDS_KNOWN), Linux on
x86-64, and methods that answer as expected when they are tried.  Elsewhere the guard asks Python as
before.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Callable

from ltc.errors import Unsupported
from ltc.llvm.compiler.object_loader import Memory

# Places of methods: c10/core/impl/DeviceGuardImplInterface.h declares them in this order.
TYPE, EXCHANGE_DEVICE, GET_DEVICE, GET_STREAM, EXCHANGE_STREAM = 0, 1, 2, 5, 9
_BEFORE = 2  # words of a table before its first method: for casts and type information
_WORDS = 64  # more than it has methods: those after the last are copied and never called
_WORD = 8
# endbr64; mov eax, type; xor edx, edx; ret: a device of index 0 is its type, its stream has id 0
_CODE = b"\xf3\x0f\x1e\xfa\xb8%b\x31\xd2\xc3"
_METHOD = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
_tables: list[Memory] = []  # C++ may ask until the process is gone


def install(address: int, device_type: int, times_asked: Callable[[], int]) -> bool:
    """Let the guard answer without Python, for as long as the process lives; whether it does.

    address      of the C++ object
    device_type  the number that C++ has for the type of its device
    times_asked  how many times Python was asked for that type
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or not address:
        return False
    table = _word(address).value
    methods = (ctypes.c_uint64 * _WORDS).from_address(table - _BEFORE * _WORD)

    def asks_python(place: int) -> bool:
        before = times_asked()
        answer = _METHOD(methods[_BEFORE + place])(address, device_type)
        mask = 0xFF if place == TYPE else 0xFFFF  # a device: its type, then its index
        return answer & mask == device_type and times_asked() == before + 1

    places = (TYPE, EXCHANGE_DEVICE, GET_DEVICE, GET_STREAM, EXCHANGE_STREAM)
    if not all(map(asks_python, places)):
        return False
    try:
        own = _new_table(list(methods), places, device_type)
    except Unsupported:
        return False
    _word(address).value = own
    return True


def _new_table(methods: list[int], places: tuple[int, ...], device_type: int) -> int:
    """Address of the first method of a copy, whose methods at `places` give the constant.

    Raises Unsupported where the system gives no memory for code.
    """
    table = Memory(mmap.PAGESIZE)
    for place in places:
        methods[_BEFORE + place] = table.address + _WORDS * _WORD
    code = _CODE % struct.pack("=I", device_type)
    table.fill(bytearray(struct.pack(f"={_WORDS}Q", *methods) + code), mmap.PAGESIZE)
    _tables.append(table)
    return table.address + _BEFORE * _WORD


def _word(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address)
