"""Machine code in ELF objects, put into memory where it can run, without LLVM.

LLVM compiles kernels so that code, constants and a table of addresses may lie anywhere ("large",
position independent): each place that is filled in holds a distance between two of them.
Source: System V ABI, AMD64 supplement, 3.5.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ltc.errors import CodeRefused, Unsupported

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_X86_64, _LITTLE_64 = 62, b"\x7fELF\x02\x01"
_SYMBOLS, _RELOCATIONS, _WITHOUT_BYTES = 2, 4, 8  # types of sections
_WRITABLE, _IN_MEMORY = 1, 2  # flags of sections
_GLOBAL = 1  # the binding of a symbol that other objects may see
_WORD = 8

# What a place is filled with: S, where the symbol is; G, where the table keeps its address; GOT,
# where the table is; P, the place; A, a number that stands beside.
_PC64, _GOTOFF64 = 24, 25  # S + A - P; S + A - GOT
_GOT64, _GOTPC64 = 27, 29  # G + A - GOT; GOT + A - P


class Code(NamedTuple):
    """Functions in memory.

    Attributes:
        memory: The memory that holds them.
        addresses: The addresses of the named ones.
    """

    memory: Memory
    addresses: dict[str, int]


def load(
    parts: Sequence[Object], names: Sequence[str], address_of: Callable[[str], int | None]
) -> Code:
    """Load the functions of these names, ready to be called.

    Raises Unsupported for a function that is in no library, CodeRefused if the system forbids
    executable memory.

    Args:
        address_of: Gives the address of a function that no object defines.
    """
    layout = _Layout(parts)
    memory = Memory(layout.nbytes)
    image = bytearray(layout.nbytes)
    for part in parts:
        part.write(image, memory.address, address_of)
    memory.fill(image, layout.writable)
    defined = {name: memory.address + place for part in parts for name, place in part.defined()}
    return Code(memory, {name: defined[name] for name in names})


class Memory:
    """Pages that hold code, freed with this object, but not at the end of the process, when a thread
    may still run in them."""

    def __init__(self, nbytes: int):
        self._nbytes = nbytes
        flags, access = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
        self.address = _libc().mmap(None, nbytes, access, flags, -1, 0)
        if self.address in (None, ctypes.c_void_p(-1).value):
            raise CodeRefused("The system gives no memory for code.")
        release = weakref.finalize(self, _libc().munmap, self.address, nbytes)
        release.atexit = False

    def fill(self, image: bytearray, writable: int) -> None:
        """Fill the pages; the bytes before `writable` become code and read-only, the rest is data."""
        source = (ctypes.c_char * len(image)).from_buffer(image)
        ctypes.memmove(self.address, source, len(image))
        if _libc().mprotect(self.address, writable, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
            raise CodeRefused("The system forbids executable memory.")


def is_code_allowed() -> bool:
    """Return True if the system lets memory become code: hardened ones may not."""
    try:
        Memory(mmap.PAGESIZE).fill(bytearray(mmap.PAGESIZE), mmap.PAGESIZE)
    except CodeRefused:
        return False
    return True


@functools.cache
def _libc() -> ctypes.CDLL:
    libc, place, size = ctypes.CDLL(None), ctypes.c_void_p, ctypes.c_size_t
    number = ctypes.c_int
    libc.mmap.restype = place
    libc.mmap.argtypes = [place, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [place, size]
    libc.mprotect.argtypes = [place, size, number]
    return libc


class UnknownObject(Unsupported):
    """Not an ELF object of an x86-64 processor."""


class _Section(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    name: int
    info: int
    visibility: int
    section: int
    value: int
    size: int


class Object:
    """One object, and where its parts come to lie: `places` by section, `table` of its words.

    Raises UnknownObject where it is none of this kind, Unsupported where it asks for what is not
    known here, and ValueError, struct.error or IndexError where it is not whole.
    """

    def __init__(self, code: bytes):
        header = _HEADER.unpack(code[: _HEADER.size].ljust(_HEADER.size, b"\0"))
        if not header[0].startswith(_LITTLE_64) or header[2] != _X86_64:
            raise UnknownObject("The machine code is for another kind of processor.")
        self._code = code
        start, count = header[6], header[12]
        self.sections = [
            _Section(*found)
            for found in _SECTION.iter_unpack(code[start : start + count * _SECTION.size])
        ]
        (symbols,) = [s for s in self.sections if s.type == _SYMBOLS]
        self._texts = self.sections[symbols.link].offset
        self._symbols = [_Symbol(*found) for found in _SYMBOL.iter_unpack(self._bytes(symbols))]
        self._relocations = list(self._found_relocations())
        self._words = self._numbered_words()
        self.words = len(self._words)
        self.places: dict[int, int] = {}
        self.table = 0

    def names(self) -> set[str]:
        """Return the names of the functions that others may call."""
        symbols = [s for s in self._symbols if self._is_here(s) and s.info >> 4 == _GLOBAL]
        return {self._name(symbol) for symbol in symbols}

    def in_memory(self) -> Iterator[tuple[int, _Section]]:
        for number, section in enumerate(self.sections):
            if section.flags & _IN_MEMORY and section.size:
                yield number, section

    def defined(self) -> Iterator[tuple[str, int]]:
        """(name, place) of what others may call."""
        for symbol in self._symbols:
            if self._is_here(symbol) and symbol.info >> 4 == _GLOBAL:
                yield self._name(symbol), self.places[symbol.section] + symbol.value

    def write(self, image: bytearray, start: int, address_of: Callable[[str], int | None]) -> None:
        """Put everything in its place of an image that is to begin at the address `start`."""
        for number, section in self.in_memory():
            if section.type != _WITHOUT_BYTES:
                place = self.places[number]
                image[place : place + section.size] = self._bytes(section)
        for symbol, word in self._words.items():
            address = self._address(self._symbols[symbol], start, address_of)
            struct.pack_into("<Q", image, self.table + _WORD * word, address)
        for place, value in map(self._value, self._relocations):
            struct.pack_into("<q", image, place, value)

    def _value(self, relocation: tuple[int, int, int, int, int]) -> tuple[int, int]:
        """(place, what it is filled with)"""
        section, offset, kind, symbol, added = relocation
        place = self.places[section] + offset
        if kind == _GOTPC64:
            return place, self.table + added - place
        if kind == _GOT64:
            return place, _WORD * self._words[symbol] + added
        found = self._symbols[symbol]
        start = place if kind == _PC64 else self.table
        return place, self.places[found.section] + found.value + added - start

    def _found_relocations(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(section, offset in it, kind, number of the symbol, number to add)"""
        for section in self.sections:
            if section.type != _RELOCATIONS or not (self.sections[section.info].flags & _IN_MEMORY):
                continue
            for offset, info, added in _RELOCATION.iter_unpack(self._bytes(section)):
                kind, symbol = info & 0xFFFFFFFF, info >> 32
                is_here = self._is_here(self._symbols[symbol])
                if kind not in (_GOT64, _GOTPC64, *([_PC64, _GOTOFF64] if is_here else [])):
                    raise Unsupported(
                        f"The machine code has a relocation of the unknown kind {kind}."
                    )
                yield section.info, offset, kind, symbol, added

    def _numbered_words(self) -> dict[int, int]:
        """Symbols whose addresses the table holds -> which word of it."""
        wanted = [symbol for _, _, kind, symbol, _ in self._relocations if kind == _GOT64]
        return {symbol: word for word, symbol in enumerate(dict.fromkeys(wanted))}

    def _address(self, symbol: _Symbol, start: int, address_of) -> int:
        if self._is_here(symbol):
            return start + self.places[symbol.section] + symbol.value
        address = address_of(self._name(symbol))
        if address is None:
            raise Unsupported(f"The function {self._name(symbol)} is in no library.")
        return address

    def _is_here(self, symbol: _Symbol) -> bool:
        return 0 < symbol.section < len(self.sections)

    def _name(self, symbol: _Symbol) -> str:
        start = self._texts + symbol.name
        return self._code[start : self._code.index(b"\0", start)].decode()

    def _bytes(self, section: _Section) -> bytes:
        if section.offset + section.size > len(self._code):
            raise ValueError("The object ends before one of its sections.")
        return self._code[section.offset : section.offset + section.size]


class _Layout:
    """Places for the parts of objects: code, constants and tables, then what is written to.

    Attributes:
        nbytes: The size of all.
        writable: The place where written parts begin.
    """

    def __init__(self, parts: Sequence[Object]):
        self.nbytes = 0
        for part in parts:
            part.table = self._taken(_WORD * part.words, _WORD)
            self._place(part, _IN_MEMORY)
        self.writable = self.nbytes = -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        for part in parts:
            self._place(part, _IN_MEMORY | _WRITABLE)

    def _place(self, part: Object, flags: int) -> None:
        for number, section in part.in_memory():
            if section.flags & (_IN_MEMORY | _WRITABLE) == flags:
                part.places[number] = self._taken(section.size, section.alignment)

    def _taken(self, nbytes: int, alignment: int) -> int:
        place = -(-self.nbytes // alignment) * alignment
        self.nbytes = place + nbytes
        return place
