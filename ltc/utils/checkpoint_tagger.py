"""Names for checkpoints, and the removal of those that no name holds any more."""

from __future__ import annotations

import json
from collections.abc import Callable


class CheckpointTagger:
    """Tags such as "best" and "latest", each on one path; a path may have several.

    Args:
        remover: Called with a path that has lost its last tag.

    Example:
        >>> from ltc.utils.checkpoint_tagger import CheckpointTagger
        >>> tagger = CheckpointTagger(remover=lambda path: print("remove", path))
        >>> tagger.tag("latest", "step1")
        >>> tagger.tag("latest", "step2")
        remove step1
        >>> tagger.tags()
        {'latest': 'step2'}
    """

    def __init__(self, remover: Callable[[str], None] | None = None):
        self._remover = remover
        self._path_of: dict[str, str] = {}

    def tag(self, name: str, path: str) -> None:
        """Put the tag on `path`, taking it from where it was."""
        path = str(path)
        before = self._path_of.get(name)
        self._path_of[name] = path
        if before is not None and before not in self._path_of.values() and self._remover:
            self._remover(before)

    def tags(self) -> dict[str, str]:
        """tag -> path"""
        return dict(self._path_of)

    def save_to_json(self) -> str:
        """The tags as JSON, for `load_from_json`."""
        return json.dumps(self._path_of)

    @classmethod
    def load_from_json(
        cls, str_json: str, remover: Callable[[str], None] | None = None
    ) -> CheckpointTagger:
        """A tagger with the tags that `save_to_json` gave."""
        tagger = cls(remover)
        tagger._path_of = json.loads(str_json)
        return tagger
