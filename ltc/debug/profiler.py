"""Named regions of a program, and the region that is one training step."""

from ltc.support.observation.profiler import *  # noqa: F403  its list says what is public
