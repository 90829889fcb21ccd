"""Durations, sizes and numbers as the report on metrics writes them."""

from __future__ import annotations


def time_text(nanoseconds: float) -> str:
    """06m09s401ms746.001us: from the largest part that is not zero down to thousandths of a us."""
    whole = round(nanoseconds)
    text, started = "", False
    for unit, width, size in _TIME_PARTS:
        part, whole = divmod(whole, size)
        started = started or part > 0
        if started:
            text += f"{part:0{width}d}{unit}"
    return f"{text}{whole // 1000:03d}.{whole % 1000:03d}us"


_TIME_PARTS = (  # unit, digits, nanoseconds
    ("d", 2, 86_400_000_000_000),
    ("h", 2, 3_600_000_000_000),
    ("m", 2, 60_000_000_000),
    ("s", 2, 1_000_000_000),
    ("ms", 3, 1_000_000),
)


def bytes_text(n: float) -> str:
    """1.50KB: in the largest unit of which there is at least one, by powers of 1024."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if n < 1024:
            return f"{n:.2f}{unit}"
        n /= 1024
    return f"{n:.2f}PB"


def value_text(number: float) -> str:
    """4.00"""
    return f"{number:.2f}"


def percent_text(fraction: float) -> str:
    """50%"""
    return f"{100 * fraction:g}%"
