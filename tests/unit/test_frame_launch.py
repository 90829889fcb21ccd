"""A launch as native code makes it: the words of FrameLaunch, filled in here by Python."""

import ctypes
import struct

import numpy as np
import pytest
import torch

from ltc import config
from ltc.backends.llvm.backend import LlvmBackend
from ltc.errors import MemoryFault
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import make
from ltc.llvm.ops.memory_checks import LOOK, ROW_WORDS

BACKEND = LlvmBackend()


def program(is_checked: bool):
    """w <- w + 2 * x, in place, and the products of x with itself in new memory."""
    w, x = (make(ops.INPUT, index=k, dtype=torch.float32, shape=(5, 3)) for k in range(2))
    graph = Graph((w, x), (), (w + (x + x), x * x))
    with config.override(LTC_CHECK=is_checked):
        return BACKEND.compile(graph, 0, frozenset({0}))


def launched(launch, buffers: list[torch.Tensor]) -> tuple[int, list[torch.Tensor], torch.Tensor]:
    """Fill in the words and run; return what came of it, the outputs and the words."""
    words = torch.zeros(launch.frame // 8, dtype=torch.int64)
    block = torch.empty(launch.block + 64, dtype=torch.uint8)
    made = []
    for shape, dtype in launch.made:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        lines = -(-nbytes // 64) * 64
        around = torch.empty(lines + 2 * launch.guard, dtype=torch.uint8)
        made.append(around[launch.guard : launch.guard + nbytes].view(dtype).view(shape))
    hosts = [buffers[position] for position in launch.inputs]
    addresses = [one.data_ptr() for one in (*hosts, *made)]
    addresses += [words.data_ptr(), launch.constants, 0, block.data_ptr()]
    words[: len(addresses)] = torch.tensor(addresses)
    run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(launch.run)
    outcome = run(launch.kernels, words.data_ptr(), 1)
    return outcome, [[*hosts, *made][number] for number in launch.outputs], words


@pytest.mark.parametrize("is_checked", [True, False])
def test_it_gives_what_the_formulas_say_checked_or_not(is_checked):
    computation = program(is_checked)  # which keeps the memory that its launches read
    launch = computation.in_frame()
    assert (launch.guard > 0) == is_checked
    w, x = torch.randn(5, 3), torch.randn(5, 3)
    wanted = [w + (x + x), x * x]
    outcome, outputs, _ = launched(launch, [w, x])
    assert outcome == -1
    torch.testing.assert_close(outputs, wanted)
    assert outputs[0].data_ptr() == w.data_ptr()


def test_a_finding_of_a_check_is_raised_from_the_words():
    computation = program(is_checked=True)
    table = computation._constants.numpy()[-len(computation.plan.memory.rows) :]
    rows = table.view(np.int64).reshape(-1, ROW_WORDS)
    rows[rows[:, 0] == LOOK, 6] += 1  # what is to lie beside each value
    launch = computation.in_frame()
    outcome, _, words = launched(launch, [torch.randn(5, 3), torch.randn(5, 3)])
    assert outcome >= 0
    with pytest.raises(MemoryFault, match="it wrote beside"):
        launch.failed(outcome, words.data_ptr())


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_launch_that_is_timed_leaves_the_times_of_its_kernels(is_checked):
    timed = BACKEND.capabilities.timed(program(is_checked))
    launch = timed.in_frame()
    outcome, _, words = launched(launch, [torch.randn(5, 3), torch.randn(5, 3)])
    assert outcome == -1
    stamps = timed.stamps_in(words.data_ptr())
    times = list(timed.times(stamps))
    assert times and all(begin <= end for begin, end in times)
    moments = struct.unpack(f"={len(stamps) // 8}q", stamps)
    assert list(moments) == sorted(moments)
