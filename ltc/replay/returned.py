"""What a function has returned: how to make another like it; and which graphs it needs, or goes on into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ltc.device.call_observer import CallObserver
from ltc.device.recording.tensors import is_lazy
from ltc.device.torch_device import state_if_any
from ltc.replay.reachable import Reachable, has_graph
from ltc.replay.traced_float import plain

_GRAPH_NODES = 10_000  # of autograd's, that are looked at to see whether a backward has used them


class Unfit(Exception):
    """A part of a result cannot be made again."""


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """The tensors on a device in the containers that a replay can make again."""
    if isinstance(result, (list, tuple, dict)):
        for part in result.values() if isinstance(result, dict) else result:
            yield from tensors_in(part)
    elif is_lazy(result):
        yield result


def untraced(result: Any) -> Any:
    """With plain numbers in place of traced ones; lists and dicts stay the objects that they are."""
    if isinstance(result, tuple):
        parts = [untraced(part) for part in result]
        if all(part is before for part, before in zip(parts, result)):
            return result
        return result._make(parts) if hasattr(result, "_make") else tuple(parts)
    if isinstance(result, (list, dict)):
        for key in result if isinstance(result, dict) else range(len(result)):
            part = untraced(result[key])
            if part is not result[key]:
                result[key] = part
        return result
    return plain(result)


def form_of(result: Any, known: dict[int, tuple[str, Any]], reachable: Reachable) -> Any:
    """("list" or "tuple", parts), ("dict", keys, parts), ("plain", value), or a tensor: who holds
    its state, and whether it is the very tensor that is found there."""
    if result.__class__ in (list, tuple):
        parts = [form_of(part, known, reachable) for part in result]
        return result.__class__.__name__, parts
    if result.__class__ is dict and all(isinstance(key, (str, int)) for key in result):
        parts = [form_of(part, known, reachable) for part in result.values()]
        return "dict", list(result), parts
    if isinstance(result, (bool, int, float, str, type(None))):
        return "plain", plain(result)
    if not isinstance(result, torch.Tensor):
        raise Unfit(f"a {result.__class__.__name__}")
    if not is_lazy(result):
        raise Unfit("a CPU tensor")
    if result.layout is not torch.strided:
        raise Unfit("a sparse tensor")
    state: Any = state_if_any(result)
    found = [place for place, one in enumerate(reachable.aliases.states) if one is state]
    if found:
        same = [place for place in found if reachable.lazy[place].tensor is result]
        return "tensor", (same or found)[0], bool(same)
    if state is None or state.base is not None:
        raise Unfit(f"a view of {_named(state, reachable)}: return a clone")
    if id(state) not in known:
        raise Unfit("a tensor that it has from elsewhere")
    return known[id(state)]


def _named(view: Any, reachable: Reachable) -> str:
    """The base of a view, in words."""
    numbers = reachable.aliases.numbers()
    if view is None or id(view.base) not in numbers:
        return "another tensor"
    return reachable.aliases.told_root(numbers[id(view.base)], reachable.name_at)


@contextlib.contextmanager
def watched_graphs(tensors: Sequence[torch.Tensor], observer: CallObserver) -> Iterator[None]:
    """Tell the observer where a backward goes on into the graph of one of these, from before.

    Such a graph may compute another thing the next time, and nothing in the call says so.
    """
    nodes: list[Any] = [x.grad_fn for x in tensors if x.requires_grad and has_graph(x)]
    hooks = [node.register_prehook(lambda gradients: _hinder(observer)) for node in nodes]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hinder(observer: CallObserver) -> None:
    observer.hinder(
        "its backward goes on into the graph of a tensor that was there before: give it that "
        "detached, or make all of the graph inside"
    )


def graph_obstacle(result: Any) -> str:
    """An obstacle where a result has a graph that no backward has used."""
    for leaf in tensors_in(result):
        if leaf.grad_fn is not None and not _is_used(leaf.grad_fn):
            return "its result needs a graph: call backward inside, or return result.detach()"
    return ""


def _is_used(node: Any) -> bool:
    """Whether a backward has freed what the graph above this node had saved."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < _GRAPH_NODES:
        one = waiting.pop()
        if _has_freed(one):
            return True
        for following, _ in one.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


def _has_freed(node: Any) -> bool:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError:
                return True
    return False
