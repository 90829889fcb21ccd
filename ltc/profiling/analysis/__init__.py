"""Findings from the tables of a trace: where the time went, its bound, and what to mend."""
