"""`torch_xla.test.test_utils`: the lines that its example programs print, and their summaries."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from ltc.core import lazy_model as ltm
from ltc.support.observation import metrics


def now(format: str = "%H:%M:%S") -> str:
    """The time of day."""
    return time.strftime(format)


def mp_test(func: Callable[..., Any]) -> Callable[..., Any]:
    """A test that runs in a forked process of its own; AssertionError where that fails."""

    @functools.wraps(func)
    def in_a_process(*args: Any, **kwargs: Any) -> None:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=func, args=args, kwargs=kwargs)
        process.start()
        process.join()
        assert process.exitcode == 0, f"{func.__name__} ended with {process.exitcode}"

    return in_a_process


def get_summary_writer(logdir: str | None) -> Any:
    """A writer for TensorBoard on the first replica; None on others, or without a folder."""
    if not logdir or not ltm.is_master_ordinal():
        return None
    tensorboard: Any = importlib.import_module("torch.utils.tensorboard")  # which may be missing
    return tensorboard.SummaryWriter(log_dir=logdir)


def close_summary_writer(summary_writer: Any) -> None:
    """Write what is left; nothing for None."""
    if summary_writer is not None:
        summary_writer.close()


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: dict[str, float] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Write the numbers, and, where asked for, the metrics; nothing for None."""
    if summary_writer is None:
        return
    numbers = dict(dict_to_write or {})
    if write_xla_metrics:
        for name in metrics.counter_names():
            numbers[f"counters/{name}"] = metrics.counter_value(name) or 0
    for name, value in numbers.items():
        summary_writer.add_scalar(name, value, global_step)


def print_training_update(
    device: Any,
    step: int,
    loss: Any,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """One line about a training step; its numbers go to the summary too."""
    value = float(loss)
    parts = [
        f"| Training Device={device}",
        *([] if epoch is None else [f"Epoch={epoch}"]),
        f"Step={step} Loss={value:.5f} Rate={rate:.2f} GlobalRate={global_rate:.2f} Time={now()}",
    ]
    print(" ".join(parts), flush=True)
    write_to_summary(summary_writer, step, {"loss": value, "rate": rate})


def print_test_update(
    device: Any, accuracy: float | None, epoch: int | None = None, step: int | None = None
) -> None:
    """One line about a test."""
    parts = [
        f"| Test Device={device}",
        *([] if step is None else [f"Step={step}"]),
        *([] if epoch is None else [f"Epoch={epoch}"]),
        *([] if accuracy is None else [f"Accuracy={accuracy:.2f}"]),
        f"Time={now()}",
    ]
    print(" ".join(parts), flush=True)
