"""`python -m ltc.compat.torch_xla script.py [args]`: run a script that was written for torch_xla."""

import runpy
import sys
from pathlib import Path

from ltc.compat.torch_xla.alias_modules import main_spec


def main() -> None:
    """Run the script that the arguments name as the main program of this process."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m ltc.compat.torch_xla script.py [args]")
    if not Path(sys.argv[1]).is_file():
        sys.exit(f"python -m ltc.compat.torch_xla: there is no file {sys.argv[1]}")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_module(main_spec(sys.argv[0]).name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
