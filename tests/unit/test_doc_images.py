"""The docs' pictures of pages are made by a script, of the page as it is now."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "code"))
import doc_images


def test_each_picture_of_the_docs_is_made_by_the_script():
    assert {file.name for file in doc_images.IMAGES.glob("*.png")} == set(doc_images.PROGRAMS)


def test_each_picture_stands_on_a_page():
    pages = "".join(file.read_text() for file in (ROOT / "docs").glob("*.md"))
    assert [name for name in doc_images.PROGRAMS if f"images/{name}" not in pages] == []


def test_the_pictures_are_those_of_the_present_page():
    kept = (doc_images.IMAGES / "made_of.txt").read_text().strip()
    assert kept == doc_images.made_of(), "python scripts/code/doc_images.py makes them anew"
