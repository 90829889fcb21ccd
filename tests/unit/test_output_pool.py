"""Large outputs lie in memory that is used again, and never while any tensor lies in it."""

import os
import threading

import pytest
import torch

from ltc.backends.llvm import output_pool
from ltc.backends.llvm.output_pool import LARGE_BYTES, OutputPool

pytestmark = pytest.mark.skipif(
    not output_pool._HAS_HUGE_PAGES, reason="the allocator's own memory is used here"
)


def test_memory_comes_back_when_its_last_tensor_is_gone():
    pool = OutputPool()
    whole = pool.empty((1024, 1024), torch.float32)
    address, part = whole.data_ptr(), whole[3]
    del whole
    assert pool.free_bytes == 0
    part.fill_(1)
    del part
    assert pool.free_bytes == 4 << 20
    assert pool.empty((2, 512, 1024), torch.float32).data_ptr() == address


def test_two_that_live_at_one_time_share_nothing():
    pool = OutputPool()
    first, second = (pool.empty((1 << 20,), torch.int32) for _ in range(2))
    first.fill_(1), second.fill_(2)
    assert first.sum() == 1 << 20 and second.sum() == 2 << 20


def test_tensors_begin_at_a_huge_page_and_hold_what_they_should():
    for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.int64):
        x = OutputPool().empty((3, 700_001), dtype)
        assert x.shape == (3, 700_001) and x.dtype == dtype and x.is_contiguous()
        assert x.data_ptr() % (2 << 20) == 0
        assert x.untyped_storage().nbytes() == x.nbytes


def test_what_is_kept_is_bounded_and_the_oldest_goes_first():
    pool = OutputPool(most_free_bytes=8 << 20)
    tensors = [pool.empty((1 << 20,), torch.int32) for _ in range(5)]
    newest = tensors[-1].data_ptr()
    while tensors:
        tensors.pop(0)
    assert pool.free_bytes == 8 << 20
    assert pool.empty((1 << 20,), torch.int32).data_ptr() == newest


def test_small_outputs_are_left_to_the_allocator():
    assert output_pool.empty((LARGE_BYTES // 4 - 1,), torch.float32).untyped_storage().resizable()


def test_many_threads_take_and_give_back():
    pool, wrong = OutputPool(), []

    def work(number: int) -> None:
        for _ in range(50):
            x = pool.empty((1 << 20,), torch.int32)
            x[::4096] = number
            if not (x[::4096] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process_writes_to_memory_of_its_own():
    pool = OutputPool()
    x = pool.empty((1 << 20,), torch.int32)
    x[:10] = 1
    child = os.fork()
    if child == 0:
        x[:10] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert x[:10].tolist() == [1] * 10
