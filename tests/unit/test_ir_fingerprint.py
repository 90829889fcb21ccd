"""The fingerprint of recorded calls: equal in every process, different where programs differ."""

import subprocess
import sys

import torch

from ltc.aten.call import Call, CallResult, Numbering, Scalar
from ltc.ir.graph import fingerprint

add = torch.ops.aten.add.Tensor


def make(call, *shape, dtype=torch.float32):
    call.results = (CallResult(None, call, 0, shape, dtype),)
    return call


def calls_of(alpha=1, slot=0, sample=2.0, shape=(2, 3), position=7, device="cpu"):
    x = make(Call("ltc::input", (0,), {}), *shape)
    b = make(Call("ltc::barrier", (x.results[0], position), {}), *shape)
    scalar = Scalar(slot, sample, torch.float64, True, "other")
    args = (b.results[0], [scalar, None, alpha], torch.device(device, 0))
    return [x, b, make(Call(add, args, {"alpha": alpha}), *shape)]


def named(calls, outputs):
    return fingerprint(calls, outputs, Numbering(calls).slots)


def print_of(**changes):
    calls = calls_of(**changes)
    return named(calls, calls[-1].results)


def test_static_arguments_count_by_value_and_type():
    assert len({print_of(alpha=a) for a in (1, 1.0, True, 2)}) == 4


def test_wiring_and_types_count():
    assert len({print_of(), print_of(shape=(3, 2))}) == 2
    calls = calls_of()
    assert named(calls, calls[0].results) != named(calls, calls[-1].results)


def test_the_place_of_a_scalar_among_those_of_dead_calls_does_not_count():
    assert print_of(slot=0) == print_of(slot=5)


def test_values_of_scalars_barriers_and_device_indices_do_not_count():
    assert print_of() == print_of(sample=9.0) == print_of(position=8)


def test_it_is_equal_in_another_process():
    code = "from tests.unit.test_ir_fingerprint import print_of; print(print_of())"
    for seed in ("1", "2"):
        made = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        )  # fmt: skip
        assert made.stdout.strip() == print_of()


def test_a_long_chain_has_one():
    calls = [make(Call("ltc::input", (0,), {}), 4)]
    for _ in range(200_000):
        calls.append(make(Call("ltc::x", (calls[-1].results[0],), {}), 4))
    assert len(named(calls, calls[-1].results)) == 64
