"""A rank that dies in the middle of training: the others raise, and say where they were."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ltc

sys.path.insert(0, str(Path(__file__).parent))

from replicas import in_processes


def check_rank_1_dies(rank, world):
    x = torch.ones(4, device="ltc:0")
    for step in range(3):
        if rank == 1 and step == 2:
            os._exit(0)
        dist.all_reduce(x)
        ltc.sync(wait=True)


def test_the_others_raise_and_name_the_collective_and_the_line(found):
    text = found.failed[0]["check_rank_1_dies"]
    assert "all_reduce sum" in text and "f32[4]" in text, text
    assert "test_dead_rank.py:24 in check_rank_1_dies" in text, text


# --- whatever carries the call ------------------------------------------------------------------


def ones(device: str = "ltc:0") -> torch.Tensor:
    return torch.ones(4, device=device)


CALLS = {
    "all_reduce": lambda x: (dist.all_reduce(x), x.cpu()),
    "reduce": lambda x: dist.reduce(x, 0),
    "gather": lambda x: (
        dist.gather(x, [ones() for _ in range(3)] if dist.get_rank() == 0 else None),
        dist.get_rank() and dist.barrier(),  # who only sends may have done so before the death
    ),
    "reduce_scatter": lambda x: (dist.reduce_scatter_tensor(x, ones().repeat(3)), x.cpu()),
    "barrier": lambda x: dist.barrier(),
    "receive": lambda x: dist.recv(x, 1),
    "work": lambda x: dist.all_reduce(ones("cpu"), async_op=True).wait(),
    "objects": lambda x: dist.all_gather_object([None] * 3, 1),
    "new_group": lambda x: dist.new_group([0, 1, 2]),
}


def die_beside_a_call(ordinal: int) -> str:
    dist.init_process_group("ltc", init_method="ltc://")
    dist.barrier()
    if ordinal == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        CALLS[os.environ["CALL"]](ones())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("transport", ["auto", "hosts"])
@pytest.mark.parametrize("call", CALLS)
def test_a_killed_rank_is_named_without_the_time_limit(call, transport):
    found = in_processes(
        __file__,
        "die_beside_a_call",
        3,
        CALL=call,
        LTC_TRANSPORT=transport,
        LTC_PEER_TIMEOUT="86400",
    )
    assert found[1] == -signal.SIGKILL
    for text in (found[0], found[2]):
        assert text.startswith("PeerFailure: Replica 1 "), text
        assert "is gone" in text and "test_dead_rank.py" in text
