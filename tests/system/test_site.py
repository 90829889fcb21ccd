"""The site is built of the pages and the docstrings, without a warning, and its links lead somewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NEEDS = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")


def is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


MISSING = [one for one in NEEDS if not is_there(one)]
needs_mkdocs = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install ltc[docs])"
)


def named_pages(entries) -> list[str]:
    found = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += named_pages(value) if isinstance(value, list) else [value]
    return found


def test_the_navigation_has_every_page():
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    pages = named_pages(yaml.safe_load(text)["nav"])
    made = {"index.md", "contributing.md", "reference.md"}  # by scripts/code/site_hooks.py
    assert set(pages) == made | {path.name for path in (ROOT / "docs").glob("*.md")}
    assert len(pages) == len(set(pages))


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors.update(filter(None, (given.get("id"), given.get("name"))))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@needs_mkdocs
def test_the_reference_has_docstrings_with_their_sections(site):
    text = (site / "reference" / "index.html").read_text()
    for name in ("ltc.core.lazy_model.mark_step", "ltc.explain", "ltc.errors.OutOfMemory"):
        assert f'id="{name}"' in text
    assert "Parameters:" in text and "Raises:" in text


@needs_mkdocs
def test_links_inside_the_site_lead_somewhere(site):
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    lost = []
    for path, page in pages.items():
        for link in page.links if path.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            if known is None:
                lost += [] if target.is_file() else [f"{path.name}: {link}"]
            elif parts.fragment and unquote(parts.fragment) not in known.anchors:
                lost.append(f"{path.parent.name}: {link}")
    assert not lost
