"""Dynamo is told of ltc as soon as it is imported, and is not imported for that.

Importing it takes longer than importing everything else, and most programs never do.
"""

from __future__ import annotations

from ltc.device.dynamo import (
    default_backend,
    graph_backend,
    hidden_code,
    optimizer_steps,
    saved_exports,
)
from ltc.support.after_import import after_import
from ltc.support.torch_private import name_backend


def install() -> None:
    """Once per process."""
    default_backend.install()
    saved_exports.install()
    after_import("torch._dynamo", _introduce)


def _introduce() -> None:
    hidden_code.hide()
    optimizer_steps.install()
    name_backend("ltc", graph_backend.ltc)
