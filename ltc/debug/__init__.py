"""Counters, reports, profiles, and graphs as text."""
