"""Prints, as Markdown, every core ATen overload and how ltc runs it.

python scripts/code/ops_table.py > docs/ops.md
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ltc.aten import registry


def rows(every: bool = False) -> list[tuple[str, str, str]]:
    """(overload, how, where) of the overloads of the core set, or of every aten overload."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::") and (every or _is_core(name)):
            rule = registry.rule_of(name)
            if rule is None:
                found.append((name, "torch's CPU kernel", ""))
            else:
                own = name in registry.RULES
                place = Path(rule.place.rpartition(":")[0]).name
                found.append((name, "rule" if own else "rule of its functional form", place))
    return found


def _is_core(name: str) -> bool:
    packet, _, variant = name.removeprefix("aten::").partition(".")
    overload = getattr(getattr(torch.ops.aten, packet), variant or "default", None)
    return overload is not None and torch.Tag.core in overload.tags


def main(arguments: list[str]) -> None:
    table = rows(every="--all" in arguments)
    print("| overload | how it runs | file |\n|---|---|---|")
    for row in table:
        print(f"| `{row[0]}` | {row[1]} | {row[2]} |")
    print()
    for how, count in Counter(row[1] for row in table).most_common():
        print(f"- {count} by {how}")
    for name in registry.SKIPPED:
        print(f"- `{name}` has a rule and does not exist in torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[1:])
