"""Launches that somebody looks at: `ltc.profile`, or the profiler of torch."""
