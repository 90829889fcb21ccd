"""Appends what was counted to a file, once a step: a report, or a line of JSON."""

from ltc.support.observation.metrics_saver import *  # noqa: F403  its list says what is public
