"""The pages, the messages and the report page keep the rules of CONTRIBUTING.md for English."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEMPLATES = sorted((ROOT / "ltc" / "profiling" / "page" / "templates").glob("*"))
CODE = sorted((ROOT / "ltc").rglob("*.py"))
# A person for a thread, a process or a program.
PERSONS = re.compile(r"\b(who|whom|nobody|somebody|anybody|everybody|whoever)\b", re.IGNORECASE)
# A sentence that begins with a relative clause, so that its subject has no noun.
FRAGMENT = re.compile(r"(What|Whether|Who|Whom|Whose|Whoever|Those|Likewise|Which)\b")
# Verbs and phrases that are no English of the field.
FOREIGN = re.compile(r"\b(hangs? on|the like of|(?:is|are) told(?! apart)|comes? to be)\b")
MAX_WORDS = 40  # a writer aims at 25
BLOCK = re.compile(r"\n\s*\n|\n(?=[|#*-])|\n(?=\d+\. )")
# Between two sentences of one block.
GAP = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\[(*]|ltc |gloo |torch|[a-z_]+\.md)")
MARKUP = re.compile(r"^[-*#]+\s+|^\d+\.\s+|\{[{%].*?[%}]\}|<[^>]*>", re.DOTALL)
# Records of experiments: sentences of figures.
UNBOUNDED = {"performance_notes.md"}


def blocks_of(text: str) -> Iterator[str]:
    """Give the paragraphs, list items, headings and rows of a page, without its code."""
    prose = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    for block in BLOCK.split(prose):
        if block.strip() and not block.startswith("    "):
            yield re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))


def sentences_of(text: str) -> Iterator[str]:
    """Give the sentences of the paragraphs and list items of a page."""
    for block in blocks_of(text):
        if not block.startswith(("|", "#")):
            yield from (MARKUP.sub("", part) for part in GAP.split(MARKUP.sub("", block)))


def faults_in(text: str, max_words: int | None = MAX_WORDS) -> list[str]:
    """Return what a reader stumbles over in a page."""
    found = [block for block in blocks_of(text) if PERSONS.search(block) or FOREIGN.search(block)]
    for sentence in sentences_of(text):
        is_fragment = FRAGMENT.match(sentence) and sentence.endswith((".", ":"))
        is_long = max_words is not None and len(sentence.split()) > max_words
        if is_fragment or is_long:
            found.append(sentence)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_plain_english(page):
    text = page.read_text()
    if page.name == "CONTRIBUTING.md":
        text = text.partition("\n## English\n")[0]  # that part shows what not to write
    assert not faults_in(text, None if page.name in UNBOUNDED else MAX_WORDS)


def texts_in(source: str) -> Iterator[str]:
    """Give the strings with several words in a module, without its docstrings."""
    tree = ast.parse(source)
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in statements and len(node.value.split()) > 2:
                yield node.value


def stumbles_in(source: str) -> list[str]:
    """Return the messages of a module that name a person, or begin with a relative clause."""
    return [
        text
        for text in texts_in(source)
        if PERSONS.search(text) or FOREIGN.search(text) or FRAGMENT.match(text)
    ]


def test_messages_are_plain_english():
    found = {str(path): texts for path in CODE if (texts := stumbles_in(path.read_text()))}
    assert not found


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_the_report_page_is_plain_english(template):
    text = MARKUP.sub(" ", template.read_text())
    assert not PERSONS.findall(text) + FOREIGN.findall(text)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("What is left runs.", 1),
        ("What is left?", 0),
        ("Those that run end.", 1),
        ("A value that nobody reads.", 1),
        ("It hangs on the size.", 1),
        ("See [that page](who.md). It is short.", 0),
        ("```\nWhat nobody reads\n```", 0),
        (" ".join(["word"] * 41) + ".", 1),
        (". ".join([" ".join(["Word"] * 30)] * 2), 0),
        ("| What | nobody |", 1),
    ],
)
def test_a_fault_of_a_page_is_found(text, faults):
    assert len(faults_in(text)) == faults


def test_a_fault_of_a_message_is_found():
    assert stumbles_in('raise ValueError("what nobody had")') == ["what nobody had"]
    assert not stumbles_in('"""What it is."""\nx = "no person"')
