"""A rank that dies in the middle of training: the others raise, and say where they were."""

import os

import torch
import torch.distributed as dist

import ltc


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
    assert "test_dead_rank.py:16 in check_rank_1_dies" in text, text
