"""Explanations as a notebook shows them: a table, one row for each."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

_HEADINGS = ("kind", "times", "where", "what happened", "what to do")
_LEFT = 'style="text-align: left; vertical-align: top"'


def html_table(explanations: Iterable[Any]) -> str:
    """An HTML table of Explanations; text of the user's program is escaped."""
    head = "".join(f"<th {_LEFT}>{heading}</th>" for heading in _HEADINGS)
    rows = "".join(f"<tr>{_cells(explanation)}</tr>" for explanation in explanations)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cells(explanation: Any) -> str:
    texts = (
        escape(explanation.kind),
        str(explanation.times),
        _place(explanation),
        f"{escape(explanation.what)}<br>{escape(explanation.difference)}",
        escape(explanation.cure),
    )
    return "".join(f"<td {_LEFT}>{text}</td>" for text in texts)


def _place(explanation: Any) -> str:
    """Return the user's line, its callers, and its source."""
    if not explanation.stack:
        return "no line of the program"
    source = explanation.stack[0].source
    shown = [f"<code>{escape(source)}</code>"] if source else []
    return "<br>".join([escape(str(frame)) for frame in explanation.stack] + shown)
