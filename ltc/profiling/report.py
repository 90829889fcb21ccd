"""A trace as one page to look at."""

from __future__ import annotations

import html
import os
from typing import Any

from ltc.support.atomic_file import replacing


def write(trace: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """The kernels of a trace, the costliest first.

    trace  as the docstring of ltc/profiling has it
    """
    kernels = [kernel for program in trace["ltc"]["programs"] for kernel in program["kernels"]]
    kernels.sort(key=lambda kernel: -kernel["seconds"])
    rows = "".join(
        f"<tr><td>{kernel['seconds'] * 1e3:.3f}</td><td>{html.escape(kernel['name'])}</td>"
        f"<td>{html.escape(kernel['module'])}</td><td>{html.escape(kernel['line'])}</td></tr>\n"
        for kernel in kernels
    )
    page = (
        "<!doctype html><meta charset='utf-8'><title>ltc profile</title>"
        f"<table><tr><th>ms</th><th>kernel</th><th>module</th><th>line</th></tr>\n{rows}</table>"
    )
    with replacing(path) as file:
        file.write(page.encode())
