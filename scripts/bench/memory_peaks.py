"""The most memory that each workload needs at once: eager's live tensors, ltc's buffers and block.

    python scripts/bench/memory_peaks.py                   the six workloads
    python scripts/bench/memory_peaks.py mlp gpt           some of them
    python scripts/bench/memory_peaks.py --checkpoint      a 12-layer transformer, with and without

Eager: bytes of all storages that torch calls have made and that still live, after every call; what
a kernel needs inside is not seen. ltc: bytes of all buffers that live while a program runs, those
that it makes among them, its constants, and every block of scratch memory. Both are counted over
steady steps, parameters and optimizer state included.
"""

from __future__ import annotations

import argparse
import gc
import weakref

import torch
import workloads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ltc.core.lazy_model as ltm
from ltc.backends.llvm import executable
from ltc.backends.llvm.workspace import WorkBlock
from ltc.runtime.buffer import Buffer

STEPS = 4
LAYERS, WIDTH, HEADS, TOKENS, BATCH = 12, 256, 4, 128, 8


class LiveStorages(TorchDispatchMode):
    """Bytes of the storages that live, and the most there were since `restart`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: dict[int, weakref.ref] = {}
        self.restart()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.add(result if isinstance(result, (list, tuple)) else [result])
        return result

    def add(self, results) -> None:
        for x in results:
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                storage = x.untyped_storage()
                if id(storage) not in self._seen:
                    size = storage.nbytes()
                    self._seen[id(storage)] = weakref.ref(
                        storage, lambda _, key=id(storage), size=size: self._gone(key, size)
                    )
                    self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int, size: int) -> None:
        del self._seen[key]
        self.bytes -= size

    def restart(self) -> None:
        gc.collect()
        self.add(tensors_among(gc.get_objects()))  # and what was made where the mode was off
        self.peak = self.bytes


def tensors_among(objects) -> list[torch.Tensor]:
    return [x for x in objects if issubclass(type(x), torch.Tensor)]


class LiveBuffers:
    """The most bytes that lived while a program ran, since `restart`."""

    def __init__(self) -> None:
        self.peak = 0
        begin = executable.LlvmComputation._begin

        def counted(computation, *launch):
            values = begin(computation, *launch)
            self.peak = max(self.peak, self._now(computation, values))
            return values

        executable.LlvmComputation._begin = counted

    def _now(self, computation, values) -> int:
        objects = gc.get_objects()
        handles = [x.handle for x in objects if type(x) is Buffer]
        tensors = tensors_among([*handles, *values])
        blocks = [x.tensor for x in objects if type(x) is WorkBlock]
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for x in (*tensors, *blocks, computation._constants)
        }
        return sum(storages.values())

    def restart(self) -> None:
        gc.collect()
        self.peak = 0


def peak_of(build, count, device, **way) -> int:
    step = build(device, workloads.Way(**way))
    with count if isinstance(count, LiveStorages) else torch.enable_grad():
        for number in range(STEPS):
            if number == 2:  # by now the optimizer has its state, and ltc both its programs
                count.restart()
            step()
            ltm.wait_device_ops()
    return count.peak


def compare(name: str, build) -> None:
    torch.manual_seed(0)
    eager = peak_of(build, LiveStorages(), torch.device("cpu"))
    gc.collect()
    lazy = peak_of(build, LiveBuffers(), ltm.lazy_device(), mark=ltm.mark_step)
    executable._blocks.release()
    print(f"{name:16s} eager {eager / 1e6:8.1f} MB   ltc {lazy / 1e6:8.1f} MB   {lazy / eager:.2f}")


# --- checkpointing ------------------------------------------------------------------------------


class Transformer(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(workloads.GptBlock(WIDTH, HEADS) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def transformer(reentrant: bool | None):
    def build(device, way):
        model = Transformer(reentrant).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(BATCH, TOKENS, WIDTH).to(device).requires_grad_()

        def step():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            way.mark()
            return loss

        return step

    return build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=workloads.OPEN, help="workloads to run; default: all"
    )
    parser.add_argument(
        "--checkpoint",
        action="store_true",
        help="measure a transformer with and without checkpointing",
    )
    asked = parser.parse_args()
    if asked.checkpoint:
        modes = {"plain": None, "non-reentrant": False, "reentrant": True}
        for name, reentrant in modes.items():
            compare(name, transformer(reentrant))
        return
    for name in asked.names:
        compare(name, getattr(workloads, name))


if __name__ == "__main__":
    main()
