"""Operands of odd shapes for every rule: what the CPU takes, ltc computes alike.

The calls are those that PyTorch's own table of operators makes, forward and backward, one overload at
a time.  In each, one operand after the other is given another shape: with more dimensions of one
element, with fewer, flat, empty, or of one element alone.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import ltc.core.lazy_model as ltm
from ltc.aten.registry import rule_of
from ltc.errors import InvalidGraph

SAMPLES, CALLS, TRIES = 6, 4, 40  # of an operator, of an overload, of odd calls of an overload
# Kernels that read what they were not given, where shapes do not fit: the CPU may end the process.
UNCHECKED = ("backward", "norm", "embedding_bag")
# Memory without values, and strides that the CPU reads anew; scales that contradict the sizes; and a
# gradient of which torch's Meta kernel tells another shape than the CPU gives.
NOT_COMPARED = frozenset(
    {
        "aten::empty_like", "aten::new_empty", "aten::new_empty_strided", "aten::empty_strided",
        "aten::empty.memory_format", "aten::as_strided", "aten::as_strided_",
        "aten::as_strided_copy", "aten::as_strided_scatter", "aten::view.dtype",
        "aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa",
        "aten::_prelu_kernel_backward",
    }
)  # fmt: skip

_OF_META = "as its Meta kernel says"  # which then tells another shape than the CPU gives

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # an overload and its arguments


class _Calls(TorchDispatchMode):
    """Keeps the first different calls of each overload that has a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, dict[str, Call]] = defaultdict(dict)

    def __torch_dispatch__(self, overload, types, args=(), kwargs=None):
        kept, kwargs = self.of[overload.name()], kwargs or {}
        if len(kept) < CALLS and rule_of(overload.name()) is not None:
            copies = tree_map(_copy, (args, kwargs))
            kept.setdefault(_text(copies), (overload, *copies))
        return overload(*args, **kwargs)


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _text(arguments: Any) -> str:
    def shown(x: Any) -> str:
        return f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)

    return str(tree_map(shown, arguments))


def calls() -> dict[str, list[Call]]:
    """Of each overload with a rule, some calls that PyTorch's table of operators makes."""
    found = _Calls()
    for operator in op_db:
        if torch.float32 not in operator.dtypes:
            continue
        with contextlib.suppress(Exception):  # samples that this machine lacks something for
            samples = operator.sample_inputs(
                "cpu", torch.float32, requires_grad=operator.supports_autograd
            )
            for sample in itertools.islice(samples, SAMPLES):
                with contextlib.suppress(Exception), found:
                    made = operator.op(sample.input, *sample.args, **sample.kwargs)
                    losses = [one.abs().sum() for one in _tensors(made) if one.requires_grad]
                    sum(losses).backward()
    is_random = torch.Tag.nondeterministic_seeded
    return {
        name: list(kept.values())
        for name, kept in sorted(found.of.items())
        if kept and name not in NOT_COMPARED
        and is_random not in next(iter(kept.values()))[0].tags
    }  # fmt: skip


def _tensors(made: Any) -> list[torch.Tensor]:
    return [one for one in tree_flatten(made)[0] if isinstance(one, torch.Tensor)]


def _odd(x: torch.Tensor, same_elements: bool) -> Iterator[torch.Tensor]:
    shape = tuple(x.shape)
    yield x.reshape(*shape, 1)
    yield x.reshape(1, *shape)
    if len(shape) == 1:
        yield x.reshape(*shape, 1, 1, 1)
    if len(shape) > 1:
        yield x.reshape(-1)
    if shape and shape[0] == 1:
        yield x.reshape(shape[1:])
    if shape and shape[-1] == 1:
        yield x.reshape(shape[:-1])
    if len(shape) == 2:
        yield x.t().contiguous()
    if same_elements:
        return
    for dim, extent in enumerate(shape):
        for length in (1, 0):
            if length < extent:
                yield x.narrow(dim, 0, length).contiguous()
    if x.numel():
        yield x.flatten()[0].clone()
        yield x.flatten()[:1].clone()


def _places(arguments: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there are strided tensors in nested arguments."""
    parts = arguments.items() if isinstance(arguments, dict) else enumerate(arguments)
    for key, part in parts:
        if isinstance(part, (list, tuple)):
            yield from _places(part, (*path, key))
        elif isinstance(part, torch.Tensor) and part.layout is torch.strided:
            yield (*path, key)


def _at(arguments: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        arguments = arguments[key]
    return arguments


def _with(arguments: Any, path: tuple[Any, ...], new: Any) -> Any:
    key, *rest = path
    made = dict(arguments) if isinstance(arguments, dict) else list(arguments)
    made[key] = _with(made[key], tuple(rest), new) if rest else new
    return made


def odd_calls(known: list[Call]) -> Iterator[Call]:
    """The calls themselves, then with one operand of another shape each."""
    seen: set[str] = set()
    for overload, args, kwargs in known:
        same_elements = any(word in overload.name() for word in UNCHECKED)
        made = [(args, kwargs)]
        for path in _places(args):
            odd = _odd(_at(args, path), same_elements)
            made += [(_with(args, path, new), kwargs) for new in odd]
        for path in _places(kwargs):
            odd = _odd(_at(kwargs, path), same_elements)
            made += [(args, _with(kwargs, path, new)) for new in odd]
        for arguments in made:
            text = _text(arguments)
            if text not in seen:
                seen.add(text)
                yield (overload, *arguments)


def _results(call: Call, device: str) -> list[torch.Tensor]:
    """What a call gives, and what it leaves in its arguments."""
    overload, args, kwargs = call
    args, kwargs = tree_map(
        lambda x: _copy(x).to(device) if isinstance(x, torch.Tensor) else x, (args, kwargs)
    )
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = overload(*args, **kwargs)
    ltm.mark_step(wait=True)
    return [one.cpu() for one in _tensors((made, args, kwargs)) if one.layout is torch.strided]


def failure_of(call: Call) -> str | None:
    """What ltc does otherwise than the CPU; None where it does not, or the CPU refuses the call."""
    try:
        expected, again = _results(call, "cpu"), _results(call, "cpu")
    except Exception:
        return None
    if any(not _equal(one, other, 0) for one, other in zip(expected, again)):
        return None  # memory that nobody wrote
    text = f"{call[0].name()}{_text(call[1:])}"
    try:
        found = _results(call, "ltc")
    except Exception as error:
        if isinstance(error, InvalidGraph) and _OF_META in str(error):
            return None  # it is told, and what to do about it
        return f"{text}: {type(error).__name__}: {error}"
    for mine, theirs in zip(found, expected, strict=True):
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return f"{text}: {mine.dtype}{list(mine.shape)}, not {theirs.dtype}{list(theirs.shape)}"
        if not _equal(mine, theirs, 1e-3):  # float32, through sums of some thousand elements
            return f"{text}: {mine.flatten()[:4]}, not {theirs.flatten()[:4]}"
    return None


def _equal(x: torch.Tensor, y: torch.Tensor, rtol: float) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=rtol, atol=rtol / 10, equal_nan=True)


def failures(known: list[Call]) -> tuple[int, list[str]]:
    """(how many calls the odd ones of an overload were, what was wrong)"""
    tried = list(itertools.islice(odd_calls(known), TRIES))
    return len(tried), [found for found in map(failure_of, tried) if found is not None]
