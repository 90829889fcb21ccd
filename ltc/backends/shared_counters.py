"""Counters by which replicas that share memory wait for each other: see llvm/native/shared_counters.py.

Replicas of every backend use these; what they are made of is no concern of theirs, and a process
without such replicas imports nothing of it.
"""

from ltc.support.lazy_module import lazy_names

__getattr__ = lazy_names(
    globals(), dict.fromkeys(("Sleeper", "load", "store"), "ltc.llvm.native.shared_counters")
)
