"""Run a training on the CPU and on ltc, and print both times: what the examples beside this file share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch


def mark_step(device: str) -> None:
    """End a step on ltc; do nothing on the CPU."""
    if device != "cpu":
        import ltc.core.lazy_model as ltm

        ltm.mark_step()


def options(about: str, **defaults: int) -> dict[str, int]:
    """Read the options of an example from the command line, one for each default."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return vars(parser.parse_args())


def on_both(train: Callable[..., Any], **settings: int) -> dict[str, Any]:
    """Call `train(device, **settings)` for both devices; print its result and the time of each.

    The first steps on ltc record and compile: a short training on ltc is slower than on the CPU.

    Returns:
        The result by the name of the device.
    """
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()  # imports what all optimizers need
    results = {}
    for device in ("cpu", "ltc"):
        torch.manual_seed(0)
        began = time.perf_counter()
        results[device] = train(device, **settings)
        took = time.perf_counter() - began
        print(f"{device}: {results[device]}, {took:.1f} s", flush=True)
    return results
