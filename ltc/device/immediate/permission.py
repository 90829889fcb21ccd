"""The permission of calls to run when they are made."""

from __future__ import annotations

from ltc import config
from ltc.runtime.first_runs import may_run_uncompiled


def _is_any_set(*values: object) -> bool:
    return any(values)


def _is_op_by_op(tier: str) -> bool:
    return tier == "op_by_op"


_looks_at_programs = config.reader(
    "LTC_VERIFY", "LTC_DEBUG_NANS", "LTC_SAVE_TENSORS_FILE", of=_is_any_set
)


def may_run() -> bool:
    """Return True if the process's settings allow calls to run at once."""
    return may_run_uncompiled() and not _looks_at_programs()


# True if every call is to run at once that may.
is_forced = config.reader("LTC_TIER", of=_is_op_by_op)
