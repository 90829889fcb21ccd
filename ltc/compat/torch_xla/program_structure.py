"""Loops, recomputation and traced functions: in XLA parts of a program, here calls that are recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn


def checkpoint(function: Callable, *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`function(*args)`, whose intermediate values a backward computes again.

    torch_xla's is reentrant, and gives no gradients where no argument asks for one; so it is here
    where the script says use_reentrant=True.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def checkpoint_module(module: nn.Module) -> nn.Module:
    """The module, whose forward is a `checkpoint`."""
    module.forward = functools.partial(checkpoint, module.forward)
    return module


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: Sequence[torch.Tensor],
    model: nn.Module,
    carried_tensors: Sequence[torch.Tensor] | None = None,
) -> Any:
    """Return the mean loss of a step for each row of the tensors, and add up their gradients.

    Args:
        train_step: Takes one row of each tensor and the carried ones; returns its loss, or the loss
            and the values carried to the next.
        iterable_tensors: All of one length.

    Returns:
        The mean loss; with carried tensors, a tuple of it and of these.

    Raises:
        ValueError: For no tensors, or tensors of different lengths.
    """
    _check_rows(iterable_tensors)
    count, carried = iterable_tensors[0].size(0), list(carried_tensors or ())
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = None
    for row in range(count):
        result = train_step(*[tensor[row] for tensor in iterable_tensors], *carried)
        loss, *carried = result if carried else (result,)
        (loss / count).backward(inputs=parameters)
        mean = loss.detach() / count
        total = mean if total is None else total + mean
    return (total, *carried) if carried else (total,)


def _check_rows(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ValueError("gradient_accumulation: iterable_tensors is empty; give it a batch.")
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            raise ValueError(
                f"Element {position} of iterable_tensors is not a tensor, or is empty."
            )
        if tensor.size(0) != tensors[0].size(0):
            raise ValueError(
                f"Element {position} of iterable_tensors has {tensor.size(0)} rows, and element 0 "
                f"{tensors[0].size(0)}: all elements need the same number of rows."
            )


def scan(fn: Callable, init: Any, xs: Any, **_: Any) -> tuple[Any, Any]:
    """The last carry, and every result, of `carry, y = fn(carry, x)` over the rows of `xs`.

    Args:
        xs: A tensor, or nested tuples, lists and dicts of them; so is what `fn` returns.
    """
    leaves: list[torch.Tensor] = []
    _mapped(leaves.append, xs)
    carry, results = init, []
    for row in range(leaves[0].size(0)):
        carry, y = fn(carry, _mapped(lambda tensor, row=row: tensor[row], xs))
        results.append(y)
    return carry, _mapped(lambda *rows: torch.stack(rows), *results)


def _mapped(function: Callable, *nests: Any) -> Any:
    """The nest of what `function` gives for the tensors that stand in one place of all nests."""
    first = nests[0]
    if isinstance(first, dict):
        return {key: _mapped(function, *[nest[key] for nest in nests]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)([_mapped(function, *parts) for parts in zip(*nests)])
    return first if first is None else function(*nests)


def scan_layers(layers: Iterable[nn.Module], input_data: Any, **_: Any) -> Any:
    """Apply the layers to the input, one behind the other."""
    for layer in layers:
        input_data = layer(input_data)
    return input_data


def while_loop(
    cond_fn: Callable, body_fn: Callable, carried_inputs: Sequence, additional_inputs: Any = None
) -> tuple:
    """Return the last `carried = body_fn(*carried)` while `cond_fn(*carried)` is true.

    Each turn reads the condition, and so runs the pending calls.
    """
    carried, more = tuple(carried_inputs), tuple(additional_inputs or ())
    while bool(cond_fn(*carried, *more)):
        result = body_fn(*carried, *more)
        carried = tuple(result) if isinstance(result, (list, tuple)) else (result,)
    return carried


def assume_pure(fn: Callable) -> Callable:
    """The function itself: what it records a second time is compiled once in any case."""
    return fn


def extract_compiled_graph(graph: torch.fx.GraphModule, args: Sequence) -> Callable:
    """Dynamo's graph as a function: its calls are recorded with what surrounds it."""
    return graph
