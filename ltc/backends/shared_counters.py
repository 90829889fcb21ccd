"""Counters by which replicas that share memory wait for each other: see llvm/native/shared_counters.py.

Replicas of every backend use these; what they are made of is no concern of theirs.
"""

from ltc.llvm.native.shared_counters import Sleeper, load, store

__all__ = ["Sleeper", "load", "store"]
