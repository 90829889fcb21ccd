"""A trace as one page to look at: `python -m ltc report out.json`, `ltc.profile(..., html=...)`."""

from __future__ import annotations

import os
from typing import Any

from ltc.profiling.page.document import document
from ltc.support.atomic_file import replacing


def write(trace: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """The page of a trace: the old file or the new one is at `path`, never a part.

    trace  as the docstring of ltc/profiling has it; ValueError where it is something else
    """
    page = document(trace)
    with replacing(path) as file:
        file.write(page.encode())
