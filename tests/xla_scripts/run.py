"""Runs scripts, and the claims about the stand-in itself, in one process: how each went, as JSON.

python tests/xla_scripts/run.py script.py …
"""

import json
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import ltc.compat.torch_xla  # noqa: F401  what a user adds in front of a script

CLAIMS = Path(__file__).with_name("claims.py")


def how_it_went(run: Callable[[], object]) -> str:
    """ "" where it came to its end, else its traceback."""
    try:
        run()
    except BaseException:
        return traceback.format_exc()
    return ""


def main(scripts: list[str]) -> dict[str, str]:
    claims = runpy.run_path(str(CLAIMS))
    outcomes = {
        name: how_it_went(claim) for name, claim in claims.items() if name.startswith("check_")
    }
    for path in scripts:
        outcomes[Path(path).stem] = how_it_went(lambda: runpy.run_path(path, run_name="__main__"))
    return outcomes


if __name__ == "__main__":
    result = main(sys.argv[1:])
    print(json.dumps(result))
