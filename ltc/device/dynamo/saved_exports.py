"""torch.export.save of a program whose weights are on ltc.

It writes the bytes that a weight's storage points at, and an ltc tensor's points at none.  So these
weights go into the archive as torch.save writes them, which it has for tensors of other classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ltc.device.recording.tensors import is_lazy
from ltc.support.after_import import after_import
from ltc.support.torch_private import EXPORT_ARCHIVE, has_own_dispatch, is_pickled_in_exports


def install() -> None:
    """Once per process; torch.export is not imported for it."""
    after_import(EXPORT_ARCHIVE, _let_weights_be_pickled)


def _let_weights_be_pickled() -> None:
    question = is_pickled_in_exports()
    question.replace(_or_is_on_ltc(question.current))


def _or_is_on_ltc(original: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], bool]:
    @functools.wraps(original)
    def is_pickled(tensor: torch.Tensor) -> bool:
        return original(tensor) or (is_lazy(tensor) and not has_own_dispatch(tensor))

    return is_pickled
