"""Where ltc runs: said in one sentence at import, before something that is missing says it worse."""

from __future__ import annotations

import sys

_POSIX = "linux", "darwin"


def require_known_system() -> None:
    """Raises ImportError on a system or processor that ltc has no way for."""
    if sys.platform not in _POSIX:
        raise ImportError(
            f"ltc runs on Linux and macOS, and this is {sys.platform}: it locks files, shares memory "
            f"and forks as these do. On Windows, use it in WSL 2."
        )
    if sys.byteorder != "little":
        raise ImportError(
            "ltc runs on processors that store the lowest byte first, and this one does not: what it "
            "shares between processes and threads is laid out for these."
        )
