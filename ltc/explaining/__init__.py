"""Reasons for slowness: kept when the events happen, told as text, logged, and bounded by budgets."""
