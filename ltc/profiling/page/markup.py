"""Text, numbers and tables as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ltc.profiling.page.templating import filled

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_THOUSANDS = ("", " k", " M", " G", " T")


def text(value: object) -> str:
    """Safe between tags and in attributes."""
    return str(escape(str(value)))


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
    """The content of a table's cell.

    Attributes:
        shown: The content, as markup.
        order: The number that rows are sorted by; None: the text.
        bar: A share from 0 to 1 that is drawn behind it; None: none.
    """

    shown: Markup
    order: float | None = None
    bar: float | None = None


def words(value: object, title: str = "") -> Cell:
    """Text; `title` is shown when one points at it."""
    if not title:
        return Cell(Markup("<span>{}</span>").format(value))
    return Cell(Markup('<span title="{}">{}</span>').format(title, value))


def number(shown: str, order: float, bar: float | None = None) -> Cell:
    """A figure, aligned with those above and below."""
    return Cell(escape(shown), order, bar)


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], name: str, top: int = 0) -> Markup:
    """Sorted by its heads and filtered by the words of its rows; `name` is read aloud for it.

    Args:
        top: The number of rows that are shown until a reader asks for all; 0: all.
    """
    rows = list(rows)
    numeric = [all(row[k].order is not None for row in rows) for k in range(len(heads))]
    return filled("table", heads=list(zip(heads, numeric)), rows=rows, name=name, top=top)


def section(identity: str, title: str, body: str, about: str = "") -> Markup:
    """A part of the page, which the navigation and a digit key lead to."""
    return filled("section", identity=identity, title=title, body=Markup(body), about=Markup(about))


def nothing(told: str) -> Markup:
    """Return the note for an empty section."""
    return Markup('<p class="nothing">{}</p>').format(told)
