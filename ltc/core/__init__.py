"""Imports of a training script: `lazy_model` (ltm) and `functions` (collectives with gradients).

lazy_model gathers the names of devices, replicas, training (steps and files) and exchanges.
"""

from ltc.support.lazy_module import lazy_names

__getattr__ = lazy_names(globals())  # `ltc.core.lazy_model` needs no import of its own
