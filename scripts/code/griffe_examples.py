"""An extension of griffe: Google's section Example is one of examples; sessions in the text are code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_EXAMPLE = re.compile(r"^([ ]*)Example:[ ]*$", re.M)


_SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.M)  # outside sections, whose text is indented


class Examples(Extension):
    """Let griffe find the examples of every docstring."""

    def on_object(self, *, obj: Any, **options: Any) -> None:
        """Change one docstring."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = _SESSION.sub(r"```pycon\n\g<0>\n```", text)
