"""A backend of one's own: NumPy computes the primitives that it has a row for, ltc computes the others.

The least that a vendor writes is here: a table of primitives, buffers that go to the device and back, and a loop
over a graph. What is not in the table is cut out and runs on the CPU; the last line counts it, and so says which
row to write next. docs/vendor.md explains each part, and shows a whole table.
"""

import os

os.environ.setdefault("LTC_BACKEND", "numpy")  # before the first tensor

import numpy as np
import torch
from on_both import mark_step, on_both, options
from torch import nn

from ltc.backends import interface as vendor
from ltc.debug import metrics
from ltc.ir import ops
from ltc.ir.node import constant_value

DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.bool: bool,
}


def plain(function):
    """Return the row of a primitive without attributes."""
    return lambda node, *operands: function(*operands)


ROWS = {
    ops.ADD: plain(np.add),
    ops.SUB: plain(np.subtract),
    ops.MUL: plain(np.multiply),
    ops.DIV: plain(np.divide),
    ops.TANH: plain(np.tanh),
    ops.MATMUL: plain(np.matmul),
    ops.SUM: lambda node, x: x.sum(axis=node.attr("dims"), dtype=DTYPES[node.dtype]),
    ops.CAST: lambda node, x: x.astype(DTYPES[node.dtype]),
    ops.CONSTANT: lambda node: np.array(constant_value(node), DTYPES[node.dtype]),
    ops.PERMUTE: lambda node, x: x.transpose(node.attr("dims")),
    ops.RESHAPE: lambda node, x: x.reshape(node.shape),
    ops.EXPAND: lambda node, x: np.broadcast_to(x, node.shape),
}


def accepts(node) -> bool:
    """Return True if NumPy has the dtypes of a node and of its operands."""
    return all(getattr(one.type, "dtype", None) in DTYPES for one in (node, *node.inputs))


class NumpyComputation:
    """A graph, interpreted at each launch. A buffer is an array; a torch tensor where NumPy lacks the dtype."""

    def __init__(self, graph):
        self.graph = graph

    @staticmethod
    def upload(tensor, device):
        return tensor.numpy().copy() if tensor.dtype in DTYPES else tensor.clone()

    @staticmethod
    def download(buffer):
        return buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)

    @staticmethod
    def wait(device):
        """NumPy has finished when it returns."""

    def launch(self, buffers, scalars):
        known = {node: buffers[node.attr("index")] for node in self.graph.inputs}
        numbers = [node for node in self.graph.scalars if node.dtype in DTYPES]
        known |= {one: np.array(scalars[one.attr("slot")], DTYPES[one.dtype]) for one in numbers}
        results = vendor.LoweringContext(NumpyBackend.lowering, known).lower(*self.graph.outputs)
        return [
            one if isinstance(one, torch.Tensor) else np.array(one, order="C") for one in results
        ]


class NumpyBackend:
    """Makes computations for the devices, of which there is one."""

    name, computation = "numpy", NumpyComputation
    lowering = vendor.NodeLowering(ROWS, accepts)

    def devices(self):
        return (vendor.DeviceInfo("CPU", "NumPy"),)

    def compile(self, graph, device, donated):
        return NumpyComputation(graph)

    def prepare_to_exit(self):
        """Nothing runs in the background."""


vendor.BackendRegistrar.register("numpy", NumpyBackend)


def train(device: str, steps: int, width: int) -> str:
    """Fit a small network to a product of two numbers; return the last loss."""
    torch.manual_seed(0)
    x = torch.rand(256, 2) * 2 - 1
    x, y = x.to(device), (x[:, :1] * x[:, 1:]).to(device)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        mark_step(device)
    return f"loss {loss.item():.4f}"


if __name__ == "__main__":
    with metrics.counted() as grown:
        on_both(train, **options(__doc__, steps=300, width=32))
    lacking = [name.removeprefix("CutOut::") for name in grown if name.startswith("CutOut::")]
    print("computed on the CPU, for lack of a row:", ", ".join(sorted(lacking)) or "nothing")
