"""Text, numbers and tables as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_THOUSANDS = ("", " k", " M", " G", " T")


def text(value: object) -> str:
    """Safe between tags and in attributes."""
    return html.escape(str(value), quote=True)


def milliseconds(seconds: float) -> str:
    """ "12.3 ms": three digits, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns" if seconds else "0"


def bytes_text(number: float) -> str:
    """ "1.5 MiB" """
    for unit in _BYTES[:-1]:
        if number < 1024:
            return f"{_digits(number)} {unit}"
        number /= 1024
    return f"{_digits(number)} {_BYTES[-1]}"


def count_text(number: float) -> str:
    """ "12.3 M" """
    for unit in _THOUSANDS[:-1]:
        if number < 1000:
            return f"{_digits(number)}{unit}"
        number /= 1000
    return f"{_digits(number)}{_THOUSANDS[-1]}"


def percent(share: float | None) -> str:
    """ "62 %", with a digit behind the point below 10; "" where it is not known."""
    if share is None:
        return ""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def _digits(number: float) -> str:
    if number >= 100 or number == int(number):
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def shortened(line: str) -> str:
    """ "file.py:12 in function" without the folders."""
    return line.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Cell:
    """What a table shows at one place.

    shown  as HTML
    order  what rows are sorted by where it is a number; None: text
    bar    a share from 0 to 1 that is drawn behind it; None: none
    """

    shown: str
    order: float | None = None
    bar: float | None = None


def words(value: object, title: str = "") -> Cell:
    """Text; `title` is shown when one points at it."""
    about = f' title="{text(title)}"' if title else ""
    return Cell(f"<span{about}>{text(value)}</span>")


def number(shown: str, order: float, bar: float | None = None) -> Cell:
    """A figure, aligned with those above and below."""
    return Cell(text(shown), order, bar)


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], name: str) -> str:
    """Sorted by its heads and filtered by the words of its rows; `name` is read aloud for it."""
    rows = list(rows)
    numeric = [all(row[k].order is not None for row in rows) for k in range(len(heads))]
    head = "".join(
        f'<th scope="col"{_numeric(is_number)}><button>{text(title)}</button></th>'
        for title, is_number in zip(heads, numeric)
    )
    body = "\n".join(f"<tr data-filter>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="sortable" aria-label="{text(name)}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _numeric(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _cell(cell: Cell) -> str:
    order = f' data-order="{cell.order:.6g}"' if cell.order is not None else ""
    bar = ""
    if cell.bar is not None:
        bar = f'<i class="bar" style="width:{100 * min(max(cell.bar, 0.0), 1.0):.1f}%"></i>'
    return f"<td{_numeric(cell.order is not None)}{order}>{bar}{cell.shown}</td>"


def section(identity: str, title: str, body: str, about: str = "") -> str:
    """A part of the page, which the navigation and a digit key lead to."""
    told = f'<p class="about">{about}</p>' if about else ""
    return f'<section id="{identity}"><h2>{text(title)}</h2>{told}\n{body}\n</section>'


def nothing(told: str) -> str:
    """Where there is nothing to show."""
    return f'<p class="nothing">{text(told)}</p>'
