"""A model that is moved to a device finds memory for its gradients touched, and no more than that."""

import ctypes
import os
import sys
import threading

import pytest
import torch

from ltc.backends.host_memory import madvise
from ltc.backends.llvm import output_pool
from ltc.backends.llvm.executable import LlvmComputation
from ltc.backends.llvm.host_computation import TouchedAhead
from ltc.backends.llvm.output_pool import LARGE_BYTES, OutputBlock, OutputPool

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not output_pool._HAS_HUGE_PAGES, reason="needs Linux's advice"
)
MiB = 1 << 20


def resident(block: OutputBlock) -> float:
    """Which part of it the system has found pages for."""
    pages = block.nbytes // os.sysconf("SC_PAGE_SIZE")
    found = (ctypes.c_ubyte * pages)()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(block.address, block.nbytes, found) == 0
    return sum(byte & 1 for byte in found) / pages


def can_be_asked() -> bool:
    """Whether this system knows the advice."""
    block = OutputBlock(LARGE_BYTES)
    return madvise(block.address, block.nbytes, 23) == 0


def test_as_much_as_was_moved_is_touched_and_serves_the_next_output_of_its_size():
    pool = OutputPool()
    ahead = TouchedAhead(pool)
    ahead.expect(5 * MiB)
    ahead.wait()
    (block,) = pool._free
    assert block.nbytes == 6 * MiB
    if can_be_asked():
        assert resident(block) == 1
    output = pool.empty((5 * MiB,), torch.uint8)
    assert output.data_ptr() == block.address and not pool._free


def test_a_new_stretch_is_not_touched():
    assert resident(OutputBlock(4 * MiB)) == 0


def test_small_tensors_and_more_than_the_limit_are_not_expected(monkeypatch):
    pool = OutputPool()
    ahead = TouchedAhead(pool)
    monkeypatch.setenv("LTC_PREFAULT_MB", "10")
    for nbytes in (LARGE_BYTES - 1, 11 * MiB, 6 * MiB, 6 * MiB, 4 * MiB, 2 * MiB):
        ahead.expect(nbytes)
        ahead.wait()
    assert sorted(block.nbytes for block in pool._free) == [4 * MiB, 6 * MiB]


def test_nothing_is_touched_once_a_program_has_asked_for_an_output():
    pool = OutputPool()
    ahead = TouchedAhead(pool)
    output = pool.empty((2 * MiB,), torch.uint8)
    ahead.expect(4 * MiB)
    ahead.wait()
    assert not pool._free
    del output


def test_many_threads_move_at_one_time():
    pool = OutputPool()
    ahead = TouchedAhead(pool)
    movers = [threading.Thread(target=ahead.expect, args=(2 * MiB,)) for _ in range(8)]
    for mover in movers:
        mover.start()
    for mover in movers:
        mover.join()
    ahead.wait()
    ahead.expect(2 * MiB)  # what two threads left to one that had just ended
    ahead.wait()
    assert 1 <= len(pool._free) <= 9
    assert len({block.address for block in pool._free}) == len(pool._free)


def test_a_forked_process_goes_on_with_a_thread_of_its_own():
    pool = OutputPool()
    ahead = TouchedAhead(pool)
    ahead.expect(2 * MiB)
    ahead.wait()
    child = os.fork()
    if child == 0:
        ahead.expect(4 * MiB)
        ahead.wait()
        os._exit(0 if [s.nbytes for s in pool._free] == [2 * MiB, 4 * MiB] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [s.nbytes for s in pool._free] == [2 * MiB]


def test_what_is_moved_to_a_device_is_expected(monkeypatch):
    expected = []
    monkeypatch.setattr(
        "ltc.backends.llvm.host_computation._touched_ahead.expect", expected.append, raising=True
    )
    weight, labels = torch.ones(1024, 1024), torch.ones(1024, 1024, dtype=torch.int64)
    assert torch.equal(LlvmComputation.upload(weight, 0), weight)
    LlvmComputation.upload(labels, 0)  # which nobody takes a gradient of
    assert expected == [weight.nbytes]


def test_switched_off_nothing_is_touched(monkeypatch):
    monkeypatch.setenv("LTC_PREFAULT_MB", "0")
    pool = OutputPool()
    ahead = TouchedAhead(pool)
    ahead.expect(2 * MiB)
    ahead.wait()
    assert not pool._free
