"""Processes of `spawn`: the parent, the child, the call between them, and the watchdog of deaths."""
