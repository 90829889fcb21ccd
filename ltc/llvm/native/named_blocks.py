"""Functions that threads run together: every block, value and atomic access has a name of its own.

A reader finds a block by its name in the text that LLVM gets, and so does the model in tests/models
that the protocol is tried on. Values are i64 where nothing else is said.
"""

from __future__ import annotations

from ltc.llvm.emit.builder import Builder

_BYTES = {"i64": 8, "i32": 4, "ptr": 8}


class NamedBlocks(Builder):
    """One function, block after block; `head` is what stands behind `define`."""

    def __init__(self, head: str):
        super().__init__(width=1)
        self._head = head

    def let(self, name: str, text: str) -> str:
        """The result of an instruction, by that name."""
        self.emit(f"%{name} = {text}")
        return f"%{name}"

    def word(self, name: str, base: str, number: int | str) -> str:
        """The address of a word, counted from `base`."""
        return self.let(name, f"getelementptr i64, ptr {base}, i64 {number}")

    # --- memory: without an order, no other thread is concerned

    def load(self, name: str, address: str, order: str = "", type: str = "i64") -> str:
        if not order:
            return self.let(name, f"load {type}, ptr {address}, align {_BYTES[type]}")
        return self.let(name, f"load atomic {type}, ptr {address} {order}, align {_BYTES[type]}")

    def store(self, value: str | int, address: str, order: str = "", type: str = "i64") -> None:
        if order:
            self.emit(f"store atomic {type} {value}, ptr {address} {order}, align {_BYTES[type]}")
        else:
            self.emit(f"store {type} {value}, ptr {address}, align {_BYTES[type]}")

    def change(
        self, name: str, kind: str, address: str, operand: int, order: str = "seq_cst"
    ) -> str:
        """Return the value before an atomic `xchg`, `add` or `sub`."""
        return self.let(name, f"atomicrmw {kind} ptr {address}, i64 {operand} {order}, align 8")

    def compare_and_swap(
        self, name: str, address: str, old: str, new: str, order: str, type: str = "i64"
    ) -> str:
        """Swap atomically; return whether it was `old`, and is `new` now.

        Args:
            order: The memory order on success, and on failure.
        """
        swap = f"cmpxchg ptr {address}, {type} {old}, {type} {new} {order}, align {_BYTES[type]}"
        return self.let(name, f"extractvalue {{ {type}, i1 }} {self.let('pair', swap)}, 1")

    def fence(self) -> None:
        """Make earlier stores visible to every thread that passes a fence later."""
        self.emit("fence seq_cst")

    # --- where it goes on

    def block(self, name: str) -> None:
        self.label(name)

    def go(self, block: str) -> None:
        self.emit(f"br label %{block}")

    def choose(self, comparison: str, then: str, otherwise: str) -> None:
        """`comparison`: of an icmp, or the name of an i1."""
        if not comparison.startswith("%"):
            self._count += 1
            comparison = self.let(f"is{self._count}", f"icmp {comparison}")
        self.emit(f"br i1 {comparison}, label %{then}, label %{otherwise}")

    def give(self, value: str = "void") -> None:
        self.emit(f"ret {value}")

    def text(self) -> str:
        return f"define {self._head} #0 {{\n{self.body()}\n}}\n"
