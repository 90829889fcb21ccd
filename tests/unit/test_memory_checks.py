"""What LTC_CHECK finds: memory that nobody wrote and is read, and what is written beside a value."""

import struct

import pytest
import torch

from ltc.llvm import memory_checks
from ltc.llvm.program import KernelCall, KernelRun, entry_address


def run(code, *buffers: torch.Tensor) -> None:
    """A kernel whose pointers are those buffers, its shifts added."""
    shifts = (*code.shifts, *[0] * (len(buffers) - len(code.shifts)))
    pointers = [b.data_ptr() + shift for b, shift in zip(buffers, shifts, strict=True)]
    frame = torch.zeros(2 + len(pointers) + len(code.numbers), dtype=torch.int64)
    arguments = [n for number in (*pointers, *code.numbers) for n in (0, number)]
    KernelRun([KernelCall(entry_address(code.text, code.name), tuple(arguments), 1)], 1).launch(
        frame.data_ptr()
    )


def told(fault: torch.Tensor) -> int | None:
    """What a check found; None where it found nothing."""
    (word,) = fault.tolist()
    assert word == 0 or word & 0xFF == 1
    return word >> 8 if word else None


@pytest.mark.parametrize("dtype", memory_checks.POISONS, ids=str)
def test_no_byte_of_one_poison_is_the_same_in_the_other(dtype):
    first, second = (struct.pack("<q", word) for word in memory_checks.POISONS[dtype])
    assert all(a != b for a, b in zip(first, second))


@pytest.mark.parametrize("dtype", [d for d in memory_checks.POISONS if d.is_floating_point], ids=str)
def test_the_first_poison_is_a_signalling_nan(dtype):
    elements = torch.tensor([memory_checks.POISONS[dtype][0]]).view(dtype)
    quiet = {torch.float64: 51, torch.float32: 22, torch.float16: 9, torch.bfloat16: 6}[dtype]
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert elements.isnan().all() and not (elements.view(whole) & 1 << quiet).any()


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 64, 100])
def test_a_filling_covers_its_bytes_and_no_others(nbytes):
    word = memory_checks.POISONS[torch.float64][0]
    memory = torch.zeros(120, dtype=torch.uint8)
    run(memory_checks.fill_code(None, 3, nbytes, word), memory)
    pattern = torch.frombuffer(bytearray(struct.pack("<q", word) * 20), dtype=torch.uint8)
    assert torch.equal(memory[3 : 3 + nbytes], pattern[:nbytes])
    assert not memory[:3].any() and not memory[3 + nbytes :].any()


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 100])
def test_a_look_tells_the_first_byte_that_changed(nbytes):
    word = memory_checks.POISONS[torch.bfloat16][0]
    for changed in range(-1, nbytes + 1):
        memory, fault = torch.zeros(120, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
        run(memory_checks.fill_code(None, 5, nbytes, word), memory)
        memory[5 + changed :] += 1
        if changed == -1:
            memory[5:] -= 1  # only the byte before is another
        run(memory_checks.look_code(None, 5, nbytes, word, None), memory, fault)
        assert told(fault) == (5 + changed if 0 <= changed < nbytes else None)


def test_a_look_may_be_before_the_first_byte():
    memory, fault = torch.zeros(128, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    memory[60] = 1
    run(memory_checks.look_code(None, -64, 64, 0, None), memory[64:], fault)
    assert told(fault) == -4


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16, torch.bool], ids=str)
def test_a_comparison_tells_the_first_element_that_differs(dtype):
    before = torch.ones(23, dtype=dtype)
    for differs in (None, 0, 1, 7, 8, 21, 22):
        now, fault = before.clone(), torch.zeros(1, dtype=torch.int64)
        if differs is not None:
            now[differs:] = 0
        code = memory_checks.compare_code(None, 0, None, now.nbytes, dtype.itemsize, None)
        run(code, before, now, fault)
        assert told(fault) == differs
