"""Networks drawn at random: blocks upon blocks, each fitted to the values that are there.

Every line runs on the CPU while it is drawn; what the CPU refuses, or what gives numbers that no
comparison can use, is left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from tests.networks.network import Leaf, Step, head, precision

# Sizes at which generated code changes: vectors of 8 and 16 with their neighbours, panels, primes.
SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 13, 15, 16, 16, 17)
LARGE = (23, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97, 127, 128, 129, 255, 256, 257, 300, 513)
MOST_ELEMENTS = ((1_000, 25), (4_000, 50), (40_000, 21), (150_000, 4))  # with their weights
BLOCKS = ((1, 8), (2, 34), (3, 25), (4, 15), (5, 8), (6, 5), (9, 3), (14, 1.5), (20, 0.5))
DTYPES = (("float32", 70), ("bfloat16", 11), ("float64", 9), ("float16", 10))
LARGEST = 1e4  # values beyond this are brought back: rounding stays what it is
REACH = 5  # a block is put upon one of so many latest values, so that chains become long


class Refused(Exception):
    """What was drawn can not be compared."""


def weighted(source: random.Random, table: Sequence[tuple]):
    """One of the first items, as often as the second items say."""
    return source.choices([row[0] for row in table], [row[1] for row in table])[0]


class Drawing:
    """A network that grows; `values` are the CPU's, by name.

    r        the source of everything that is drawn
    usual    the shape that most leaves have
    """

    def __init__(self, seed: object, dtype: str, special: bool) -> None:
        self.r = random.Random(f"network {seed}")
        self.dtype, self.low = dtype, self.r.choice(("bfloat16", "bfloat16", "float16"))
        self.special = special
        self.most = weighted(self.r, MOST_ELEMENTS)
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.values: dict[str, torch.Tensor] = {}
        self.unwritable: set[int] = set()
        self.names = head()
        self.names |= {
            "device": "cpu",
            "dtype": precision(dtype),
            "low": precision(self.low),
            "step": 0,
            "random": self.names["plainly"],
        }
        self.sizes = [self._size() for _ in range(self.r.choice((2, 3, 3, 4)))]
        self.usual = self.any_shape(self.r.choice((1, 2, 2, 3, 3, 3, 4, 4)))

    def _size(self) -> int:
        if self.r.random() < 0.01:
            return 0
        return self.r.choice(SMALL if self.r.random() < 0.65 else LARGE)

    # --- leaves ---

    def any_shape(self, rank: int) -> tuple[int, ...]:
        """Of the network's sizes, and small enough."""
        shape = [self.r.choice((1, *self.sizes * 3)) for _ in range(rank)]
        while math.prod(shape) > self.most:
            largest = shape.index(max(shape))
            shape[largest] = self.r.choice((2, 3, shape[largest] // 2, shape[largest] // 2))
        return tuple(shape)

    def parameter(self, shape: Sequence[int], values: str = "", **more) -> str:
        return self._leaf("parameter", shape, values=values or self._kind(), **more)

    def weight(self, shape: Sequence[int]) -> str:
        """A finite parameter.

        Whether padding meets an infinite one is for each convolution's own way to say, and a norm
        that multiplies by it before it subtracts the mean, as PyTorch's of channels do, gives NaN.
        """
        kind = self._kind()
        return self.parameter(shape, "normal" if kind == "special" else kind)

    def given(self, shape: Sequence[int], values: str = "", **more) -> str:
        return self._leaf("input", shape, values=values or self._kind(), **more)

    def either(self, shape: Sequence[int]) -> str:
        """A parameter or an input, as it comes."""
        kind = self.r.choice(("parameter", "parameter", "parameter", "input"))
        return self._leaf(kind, shape, values=self._kind(), layout=self._layout(shape))

    def like(self, name: str) -> str:
        """An input of the shape and dtype of a value."""
        x = self.values[name]
        named = "low" if x.dtype != precision(self.dtype) else "dtype"
        return self._leaf("input", tuple(x.shape), values="normal", precision=named)

    def index(self, shape: Sequence[int], count: int) -> str:
        if count < 1:
            raise Refused
        return self._leaf("index", shape, count=count)

    def mask(self, shape: Sequence[int]) -> str:
        return self._leaf("mask", shape)

    def _kind(self) -> str:
        kinds = (("normal", 88), ("positive", 4), ("halves", 6), ("special", 12 * self.special))
        return weighted(self.r, kinds)

    def _layout(self, shape: Sequence[int]) -> str:
        choices = ["every other", "expanded"] if len(shape) else []
        choices += ["turned"] if len(shape) > 1 else []
        return self.r.choice(choices) if choices and self.r.random() < 0.08 else ""

    def _leaf(self, kind: str, shape: Sequence[int], **more) -> str:
        shape = tuple(int(n) for n in shape)
        if math.prod(shape) > 2 * self.most:
            raise Refused
        letter = {"parameter": "p", "input": "x", "index": "i", "mask": "m"}[kind]
        leaf = Leaf(f"{letter}{len(self.leaves)}", kind, shape, self.r.randrange(10**6), **more)
        self.values[leaf.name] = eval(leaf.text(False), self.names)
        self.leaves.append(leaf)
        return leaf.name

    # --- values ---

    def floats(self) -> list[str]:
        return [
            n
            for n, x in self.values.items()
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]

    def recent(self) -> str:
        """A value to go on from: one of the latest, or a new leaf."""
        there = self.floats()
        if not there:
            return self.parameter(self.usual)
        if self.r.random() < 0.07:
            usual = self.r.random() < 0.7
            return self.either(self.usual if usual else self.any_shape(self.r.randint(0, 5)))
        return there[-1] if self.r.random() < 0.7 else self.r.choice(there[-REACH:])

    def partner(self, x: str) -> str:
        """A value that broadcasts to a value: an older one where there is one, or a leaf."""
        shape = tuple(self.values[x].shape)
        fitting = [n for n in self.floats() if _broadcasts(self.values[n].shape, shape)]
        if fitting and self.r.random() < 0.5:
            return self.r.choice(fitting)
        wanted = [n if self.r.random() < 0.75 else 1 for n in shape]
        if self.r.random() < 0.3:
            wanted = wanted[self.r.randint(0, len(wanted)) :]
        return self.either(wanted)

    def shape(self, x: str) -> tuple[int, ...]:
        return tuple(self.values[x].shape)

    def dim(self, x: str) -> int:
        """The number of one dimension."""
        rank = self.values[x].dim()
        if not rank:
            raise Refused
        d = self.r.randrange(rank)
        return d if self.r.random() < 0.6 else d - rank

    def dims(self, x: str) -> tuple[int, ...]:
        """The numbers of some dimensions, at least one."""
        rank = self.values[x].dim()
        if not rank:
            raise Refused
        return tuple(self.r.sample(range(rank), self.r.randint(1, rank)))

    def at_least(self, x: str, rank: int) -> str:
        """The value with more or fewer dimensions: exactly `rank` of them."""
        shape = self.shape(x)
        if len(shape) > rank:
            end = len(shape) - rank
            return self.step("{0}.flatten(0, {end})", x, end=end)
        for _ in range(rank - len(shape)):
            x = self.step("{0}.unsqueeze({d})", x, d=0)
        return x

    # --- steps ---

    def step(self, template: str, *operands: str, **attributes) -> str:
        """A new line and the name of its value; Refused, or what the CPU raises."""
        step = Step(f"v{len(self.steps)}", template, operands, tuple(attributes.items()))
        value = eval(step.text(), self.names, self.values)
        self._judge(value)
        if step.may_be_view():
            self.unwritable |= {_memory(self.values[n]) for n in operands} | {_memory(value)}
        self.values[step.name] = value
        self.steps.append(step)
        return step.name

    def is_writable(self, x: str) -> bool:
        """Whether ltc and the CPU agree on who sees a write to it."""
        return _memory(self.values[x]) not in self.unwritable

    def apart(self, x: str) -> str:
        """The value where each element has a place of its own; else a copy, of which that is true.

        What PyTorch copies with its strides, to write a part of it, it writes where they say.
        """
        return self.step("{0}.clone()", x) if _overlaps(self.values[x]) else x

    def _judge(self, value) -> None:
        if isinstance(value, (tuple, list)):
            for part in value:
                self._judge(part)
            return
        if value.is_complex() or value.numel() > 2 * self.most:
            raise Refused
        if value.is_floating_point() and value.numel() and not self.special:
            largest = float(value.detach().abs().max())
            if not largest < LARGEST:
                raise Refused

    def saved(self) -> tuple:
        return len(self.leaves), len(self.steps), dict(self.values)

    def restore(self, saved: tuple) -> None:
        leaves, steps, self.values = saved
        del self.leaves[leaves:], self.steps[steps:]


def _memory(value) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


def _overlaps(value: torch.Tensor) -> bool:
    """Whether two elements share a place in memory: asked of the places themselves."""
    size = value.untyped_storage().nbytes() // value.element_size()
    places = torch.arange(size).as_strided(value.shape, value.stride(), value.storage_offset())
    return places.unique().numel() < places.numel()


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))
