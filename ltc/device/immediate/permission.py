"""The permission of calls to run when they are made."""

from __future__ import annotations

from ltc import config
from ltc.runtime.first_runs import may_run_uncompiled

_tier = config.reader("LTC_TIER")
_looks_at_programs = config.reader("LTC_VERIFY", "LTC_DEBUG_NANS", "LTC_SAVE_TENSORS_FILE")


def may_run() -> bool:
    """Return True if the process's settings allow calls to run at once."""
    return may_run_uncompiled() and not any(_looks_at_programs())


def is_forced() -> bool:
    """Return True if every call is to run at once that may."""
    return _tier() == ("op_by_op",)
