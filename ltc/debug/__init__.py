"""Reports for people: counters, graphs, threads, the environment; what counts lies in support/observation."""

from ltc.support.lazy_module import lazy_names

__getattr__ = lazy_names(globals())  # its modules need no import of their own
