"""A network as data: leaves and lines of PyTorch, and the program of them that anyone can run.

What runs is what is printed: a network is judged by running the very text that a failure shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

HEAD = '''\
import torch
import torch.nn.functional as F


def numbers(seed, shape, dtype, kind="normal"):
    """Numbers that every dtype of a network holds exactly."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=source, dtype=torch.float64)
    if kind == "positive":
        x = x.abs() + 0.125
    if kind == "halves":
        x = (x * 2).round() / 2
    if kind == "special":
        x = x.where(x.abs() < 1.5, 1 / (x.sign() * (x.abs() > 2)))
    return x.bfloat16().to(dtype)


def positions(seed, shape, count):
    """Indices below `count`."""
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def mask(seed, shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def contiguous(norm):
    """PyTorch's backward (2.13) misreads what is not contiguous, an input or a gradient."""

    def normalized(x, *more, **options):
        y = norm(x.contiguous(), *more, **options)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.contiguous())
        return y

    return normalized


batch_norm, instance_norm = contiguous(F.batch_norm), contiguous(F.instance_norm)


def plainly(random_function, *arguments):
    return random_function(*arguments)


'''

FOOT = """

if __name__ == "__main__":
    import ltc
    import ltc.core.lazy_model as ltm

    torch.set_num_threads({threads})
    names, ours = network("ltc", mark=ltm.mark_step)
    _, theirs = network("cpu")
    _, exact = network("cpu", torch.float64, torch.float64)
    for name, x, y, z in zip(names, ours, theirs, exact):
        x, y = x.detach().cpu().double(), y.detach().double()
        if z.numel():
            apart = [float((other - z).abs().max()) for other in (x, y)]
            print(name, "ltc is", apart[0], "and the CPU", apart[1], "from float64")
"""

OPTIMIZERS = {
    "SGD": "torch.optim.SGD(leaves, lr=0.05)",
    "momentum": "torch.optim.SGD(leaves, lr=0.05, momentum=0.9, weight_decay=0.01)",
    "Adam": "torch.optim.Adam(leaves, lr=0.01{eps})",
    "AdamW foreach": "torch.optim.AdamW(leaves, lr=0.01{eps}, foreach=True)",
    "AdamW fused": "torch.optim.AdamW(leaves, lr=0.01{eps}, fused=True)",
    "RMSprop": "torch.optim.RMSprop(leaves, lr=0.01{eps})",
}
# Where ltc's result shares memory with its operand and the CPU's may not: nobody writes to either.
PERHAPS_VIEWS = ("reshape", "flatten", "contiguous", "unfold", "expand", "broadcast_to", ".to(")
LAYOUTS = {"": "", "turned": ".mT", "every other": "[::2]", "expanded": ".expand{shape}"}


@dataclass(frozen=True)
class Leaf:
    """A tensor that the network is given: a parameter, an input, indices or a mask.

    precision  the name of its dtype: "dtype" or "low"
    values     the kind of its numbers, as `numbers` takes it
    layout     how the CPU's tensor lies in memory
    count      what indices stay below
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    seed: int
    precision: str = "dtype"
    values: str = "normal"
    layout: str = ""
    count: int = 0

    def text(self, several: bool) -> str:
        """The expression that makes it; a network of several steps has other inputs in each."""
        seed = f"{self.seed} + step" if several and self.kind != "parameter" else f"{self.seed}"
        if self.kind == "mask":
            return f"mask({seed}, {self.shape}).to(device)"
        if self.kind == "index":
            return f"positions({seed}, {self.shape}, {self.count}).to(device)"
        kind = "" if self.values == "normal" else f', "{self.values}"'
        made = f"numbers({seed}, {self._made()}, {self.precision}{kind})"
        made += LAYOUTS[self.layout].format(shape=self.shape)
        return f"{made}.to(device)" + (".requires_grad_()" if self.kind == "parameter" else "")

    def _made(self) -> tuple[int, ...]:
        shape = self.shape
        if self.layout == "turned":
            return (*shape[:-2], shape[-1], shape[-2])
        if self.layout == "every other":
            return (shape[0] * 2, *shape[1:])
        return (1, *shape[1:]) if self.layout == "expanded" else shape


@dataclass(frozen=True)
class Step:
    """One line: `template` filled with the names of its operands and with its attributes."""

    name: str
    template: str
    operands: tuple[str, ...]
    attributes: tuple[tuple[str, object], ...] = ()

    def text(self) -> str:
        return self.template.format(*self.operands, **dict(self.attributes))

    def may_be_view(self) -> bool:
        return any(word in self.template for word in PERHAPS_VIEWS)


@dataclass(frozen=True)
class Network:
    """Leaves, steps in their order, and what is done around them.

    outputs    values that are held until the end and compared
    losses     scalars that gradients are taken of; none: it runs without gradients
    marks      steps after which the step ends; reads: steps after which their value is read
    backward   "sum" of all losses, "each" by itself, or "grad" of the sum by torch.autograd.grad
    optimizer  what updates the parameters between `rounds` rounds of the same steps
    autocast   whether the steps run under autocast to `low`
    """

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    losses: tuple[str, ...] = ()
    marks: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    dtype: str = "float32"
    low: str = "bfloat16"
    backward: str = "sum"
    optimizer: str = ""
    rounds: int = 1
    autocast: bool = False
    threads: int = 1

    def text(self) -> str:
        """The network as a Python program that shows how far ltc and the CPU are from float64."""
        return HEAD + self.function() + FOOT.format(threads=self.threads)

    def function(self, around: Callable[[Step], str] = Step.text) -> str:
        """The text of `network(device, dtype, low, mark, random)`.

        around  how the expression of a step is written
        """
        several = self.rounds > 1
        parameters = [leaf for leaf in self.leaves if leaf.kind == "parameter"]
        lines = [
            f"def network(device, dtype=torch.{self.dtype}, low=torch.{self.low},",
            "            mark=lambda: None, random=plainly):",
            "    names, results = [], []",
            *(f"    {leaf.name} = {self._parameter(leaf, several)}" for leaf in parameters),
            f"    leaves = [{', '.join(leaf.name for leaf in parameters)}]",
        ]
        if self.optimizer:
            lines.append(f"    optimizer = {self._optimizer()}")
        indent = "    "
        if several:
            lines.append(f"    for step in range({self.rounds}):")
            indent *= 2
        lines += [f"{indent}{line}" for line in self._round(around, several)]
        if self.losses and self.backward != "grad":
            lines += [
                "    results += [x.grad for x in leaves if x.grad is not None]",
                (
                    '    names += [f"gradient of {n}" for n, x in enumerate(leaves) '
                    "if x.grad is not None]"
                ),
            ]
        if self.optimizer:
            lines += [
                "    results += leaves",
                '    names += [f"parameter {n}" for n in range(len(leaves))]',
            ]
        return "\n".join([*lines, "    mark()", "    return names, results", ""])

    def _optimizer(self) -> str:
        """In float16 the squares of gradients vanish, and the usual eps: what is left is noise."""
        eps = ", eps=1e-3" if self.dtype == "float16" else ""
        return OPTIMIZERS[self.optimizer].format(eps=eps)

    def _parameter(self, leaf: Leaf, several: bool) -> str:
        """Without gaps where an optimizer writes to it and something may be a view of it.

        PyTorch's fused optimizer for the CPU writes beside a parameter that has gaps.
        """
        is_written = self.optimizer and any(step.may_be_view() for step in self.steps)
        is_dense = is_written or self.optimizer == "AdamW fused"
        return (replace(leaf, layout="") if is_dense else leaf).text(several)

    def _round(self, around: Callable[[Step], str], several: bool) -> list[str]:
        given = [leaf for leaf in self.leaves if leaf.kind != "parameter"]
        lines = ["optimizer.zero_grad()"] if self.optimizer else []
        lines += [f"{leaf.name} = {leaf.text(several)}" for leaf in given]
        indent = ""
        if self.autocast:
            lines.append("with torch.autocast(torch.device(device).type, dtype=low):")
            indent = "    "
        elif not self.losses:
            lines.append("with torch.no_grad():")
            indent = "    "
        lines += [indent + line for line in self._steps(around)]
        if self.losses:
            lines += BACKWARD[self.backward](", ".join(self.losses))
        lines.append(f"results += [{', '.join(self.outputs)}]")
        lines.append(f"names += {list(self.outputs)}")
        if self.optimizer:
            lines += ["optimizer.step()", "mark()"]
        return lines

    def _steps(self, around: Callable[[Step], str]) -> list[str]:
        lines, last = [], self._last_uses()
        for step in self.steps:
            lines.append(f"{step.name} = {around(step)}")
            if step.name in self.reads:
                lines.append(f"results.append({step.name}.detach().cpu().clone())")
                lines.append(f'names.append("{step.name}, read")')
            if gone := last.get(step.name):  # what nobody holds is never in memory
                lines.append(f"del {', '.join(gone)}")
            if step.name in self.marks:
                lines.append("mark()")
        return lines or ["pass"]

    def _last_uses(self) -> dict[str, list[str]]:
        """The values that are used for the last time in a step."""
        held = {*self.outputs, *self.losses}
        last = {step.name: step.name for step in self.steps}
        for step in self.steps:
            last.update({name: step.name for name in step.operands if name in last})
        gone: dict[str, list[str]] = {}
        for name, step in last.items():
            if name not in held:
                gone.setdefault(step, []).append(name)
        return gone

    def pruned(self) -> Network:
        """Without the leaves that no step takes, and marks and reads of steps that are gone."""
        used = {name for step in self.steps for name in step.operands}
        used |= {*self.outputs, *self.losses}
        there = {step.name for step in self.steps}
        return replace(
            self,
            leaves=tuple(leaf for leaf in self.leaves if leaf.name in used),
            marks=self.marks & there,
            reads=self.reads & there,
        )


BACKWARD = {
    "sum": lambda losses: [f"sum([{losses}]).backward()"],
    "each": lambda losses: [f"for loss in [{losses}]:", "    loss.backward(retain_graph=True)"],
    "grad": lambda losses: [
        f"given = torch.autograd.grad(sum([{losses}]), leaves, allow_unused=True)",
        "results += [g for g in given if g is not None]",
        'names += [f"gradient of {n}" for n, g in enumerate(given) if g is not None]',
    ],
}


def head() -> dict:
    """The names that the text of a network's function and steps refers to."""
    names: dict = {"__name__": "network"}
    exec(HEAD, names)
    return names


def precision(name: str) -> torch.dtype:
    """The dtype of that name."""
    return getattr(torch, name)
