"""Print where an operation lives: its rule, its row, its meaning, its kernels, and its reports.

python scripts/code/where.py gelu python scripts/code/where.py matmul python scripts/code/where.py
all_reduce
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What to look for in which files, and what a hit there is called.
PLACES = (
    ("rule", "ltc/aten/**/*.py", r'[":_]{name}(_?["."]|_?\.[A-Za-z_]+")'),
    ("row", "ltc/ir/ops.py", r'\("{name}"|^{upper} ='),
    ("type rule", "ltc/ir/infer.py", r"^def {name}_?\("),
    ("identity", "ltc/passes/**/*.py", r"\bops\.{upper}:"),
    ("meaning", "ltc/backends/eager.py", r"\bops\.{upper}:"),
    ("instruction", "ltc/llvm/emit/*.py", r"\bops\.{upper}:"),
    ("loop nest", "ltc/llvm/loops/*.py", r"\bops\.{upper}:"),
    ("generator", "ltc/llvm/ops/*.py", r"\bops\.{upper}(:|:? return|\b.*:$)"),
    ("generator", "ltc/llvm/attention/lower.py", r"\bops\.{upper}:"),
    ("recorded", "ltc/distributed/*.py", r"^def {name}\("),
    ("exchange", "ltc/distributed/transport/collective_ops.py", r'"{name}": '),
    ("page", "docs/codegen.md", r"^\|.*`{name}`"),
    ("page", "docs/distributed.md", r"^\d+\. .*\b{name}\b"),
)


def places_of(name: str) -> list[tuple[str, Path, int, str]]:
    """(what, file, line number, line) for every place the operation is treated in."""
    found = []
    for what, pattern, expression in PLACES:
        wanted = re.compile(
            expression.replace("{name}", re.escape(name)).replace("{upper}", name.upper())
        )
        for path in sorted(ROOT.glob(pattern)):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if wanted.search(line):
                    found.append((what, path.relative_to(ROOT), number, line.strip()))
    return found


def main(names: list[str]) -> int:
    if not names:
        print(__doc__.strip())
        return 2
    missing = 0
    for name in names:
        found = places_of(name)
        missing += not found
        if not found:
            print(f"{name}: nowhere; an overload without a rule runs torch's own CPU kernel")
        for what, path, number, line in found:
            print(f"{what:<12} {path}:{number}: {line}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
