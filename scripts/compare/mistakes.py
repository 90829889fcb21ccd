"""Make the mistakes that users make, and print what ltc says of each: what is wrong, where, what to do.

    python scripts/compare/mistakes.py               # all of them, as a table: some minutes
    python scripts/compare/mistakes.py --name rank   # those with "rank" in their name
    python scripts/compare/mistakes.py --whole       # the whole messages

The mistakes are those of tests/system/test_mistakes.py, which run in this process, and the programs of
tests/mistaken_programs.py, which take one of their own. "-" stands where torch's own text is all that there is
to say. Exits with 1 if a mistake is silent, or if a part of its message is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ltc.native import core_build
from tests.mistaken_programs import PROGRAMS, faults_of, said_by
from tests.system.test_mistakes import TEXTS, parts_missing, text_of

PARTS = ("what", "where", "do")


@dataclass(frozen=True)
class Judgement:
    """A mistake, its message, and the parts that the message lacks.

    Attributes:
        has_cure: True if the message has to say what to do.
        works: True if the program is no mistake on ltc.
    """

    name: str
    said: str
    missing: list[str]
    has_cure: bool = True
    works: bool = False

    def row(self) -> str:
        """Return its row of the table."""
        if self.works:
            marks = ["works" if not self.missing else "FAILS", "", ""]
        else:
            marks = ["MISSING" if part in self.missing else "yes" for part in PARTS]
            if not self.has_cure:
                marks[2] = "-"
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        last = lines[-1][:90] if lines else ""
        return f"{self.name:34} {marks[0]:8} {marks[1]:8} {marks[2]:8} {last}"


def judged_here(words: str) -> Iterator[Judgement]:
    """Make the mistakes that this process can make."""
    for mistake, expected in TEXTS.items():
        if words in mistake.__name__:
            try:
                mistake()
            except Exception as error:
                missing = parts_missing(mistake, error)
                said = text_of(error)
            else:
                missing, said = list(PARTS), ""
            yield Judgement(mistake.__name__, said, missing, has_cure=expected.do is not None)


def judged_apart(words: str) -> Iterator[Judgement]:
    """Run the programs of mistakes that take a process of their own."""
    for name, mistake in PROGRAMS.items():
        if words not in name or (mistake.needs and find_spec(mistake.needs) is None):
            continue
        with tempfile.TemporaryDirectory() as folder:
            said, code = said_by(mistake, Path(folder))
        missing = faults_of(mistake, said, code)
        yield Judgement(
            name, said, missing, has_cure=mistake.do is not None, works=not mistake.what
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="", help="part of the names of the mistakes to make")
    parser.add_argument("--whole", action="store_true", help="print whole messages")
    asked = parser.parse_args()
    print(f"{'mistake':34} {'what':8} {'where':8} {'do':8} last line", flush=True)
    kept = core_build.kept_in()
    if kept is not None:  # mistakes about the folder of programs have the core, too
        os.environ.setdefault("LTC_NATIVE_DIR", str(kept.folder.absolute()))
    found = []
    for judged in chain(judged_here(asked.name), judged_apart(asked.name)):
        found.append(judged)
        print(judged.row(), flush=True)
        if asked.whole:
            print(judged.said, flush=True)
    silent = [one.name for one in found if not one.works and not one.said.strip()]
    lacking = [one.name for one in found if one.missing]
    print(
        f"{len(found)} mistakes: {len(silent)} silent, {len(lacking)} with a part missing: {lacking}"
    )
    return 1 if silent or lacking else 0


if __name__ == "__main__":
    sys.exit(main())
