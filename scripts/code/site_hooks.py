"""Hooks of mkdocs: pages made of README.md, CONTRIBUTING.md and the docstrings; links out of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"index.md": ROOT / "README.md", "contributing.md": ROOT / "CONTRIBUTING.md"}
MODULES = (
    "ltc", "ltc.core.lazy_model", "ltc.core.functions", "ltc.profiling.profile",
    "ltc.explaining.explanation", "ltc.errors", "ltc.debug.metrics", "ltc.debug.graphs",
    "ltc.distributed.parallel_loader", "ltc.distributed.lazy_multiprocessing", "ltc.amp",
)  # fmt: skip
_NORUN = re.compile(r"^([ ]*```\w+) norun$", re.M)  # blocks that the tests do not run
_NAMED_BY_FILE = re.compile(r"\[docs/(\w+\.md)\]\(docs/\1\)")
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=_from_root(path.read_text())))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def _from_root(text: str) -> str:
    """Return a page of the root with the links of a page of docs/, named by the pages' titles."""
    return _NAMED_BY_FILE.sub(_titled, text).replace("](docs/", "](")


def _titled(link: re.Match[str]) -> str:
    title = (ROOT / "docs" / link[1]).read_text().partition("\n")[0]
    return f"[{title.lstrip('# ')}]({link[1]})"


def _reference() -> str:
    blocks = (f"::: {module}\n" for module in MODULES)
    return "# Reference\n\nMade of the docstrings.\n\n" + "\n".join(blocks)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files that are on no page into plain text."""

    def inside(match: re.Match[str]) -> str:
        target, _, heading = match[1].partition("#")
        names = {"../README.md": "index.md", "../CONTRIBUTING.md": "contributing.md"}
        target = names.get(target, names.get(f"../{target}", target))
        if not target or files.get_file_from_path(target) is not None:
            return f"]({target}{'#' * bool(heading)}{heading})"
        if not (ROOT / "docs" / target).resolve().is_relative_to(ROOT):
            return match[0]
        return "]()"

    linked = _LINK.sub(inside, markdown).replace("]()", "]")
    return _NORUN.sub(r"\1", linked)
