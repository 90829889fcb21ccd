"""The page's templates: what is put into them is escaped, unless it is markup already."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_FOLDER = Path(__file__).parent


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=False,
    )


def filled(name: str, /, **values: Any) -> Markup:
    """Return a template with the values in it.

    Args:
        name: The file's name without its ending.
    """
    return Markup(_environment().get_template(f"{name}.html").render(values))


def file_text(name: str) -> Markup:
    """Return the text of a file beside this one, which stands in the page as it is."""
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))
