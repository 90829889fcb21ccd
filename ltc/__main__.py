"""`python -m ltc`, which command_line.py describes."""

import sys

from ltc.command_line import main

if __name__ == "__main__":
    sys.exit(main())
