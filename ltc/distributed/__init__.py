"""Replicas.  Here lies what users import; the folders below do the work.

launch      processes started and watched
transport   messages between threads, processes and hosts
c10d        torch.distributed on lazy tensors
"""

from ltc.support.lazy_module import lazy_names

__getattr__ = lazy_names(globals())  # its modules need no import of their own
