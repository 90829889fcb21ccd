"""Counters and timers of everything ltc does; the leaf that every other module may import."""

from ltc.support.observation.metrics import *  # noqa: F403  its list says what is public
