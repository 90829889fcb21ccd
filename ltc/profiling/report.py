"""A trace as one page to look at: `python -m ltc report out.json`, `ltc.profile(..., html=...)`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ltc.profiling.page.comparison import comparison
from ltc.profiling.page.document import document
from ltc.support.atomic_file import replacing


def write(trace: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the page of a trace: the old file or the new one is at `path`, never a part.

    Args:
        trace: A trace as help("ltc.profiling") describes it; anything else raises ValueError.
    """
    page = document(trace)
    with replacing(path) as file:
        file.write(page.encode())


def write_comparison(
    traces: Sequence[dict[str, Any]], names: Sequence[str], path: str | os.PathLike[str]
) -> None:
    """Write the page of two traces side by side.

    Args:
        traces: The one before and the one after.
        names: The names that the page shows for them.
        path: The file of the page.
    """
    page = comparison(traces, names)
    with replacing(path) as file:
        file.write(page.encode())
