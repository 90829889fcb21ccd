"""Replicas.  Here lies what users import; the folders below do the work.

launch      processes started and watched
transport   messages between threads, processes and hosts
c10d        torch.distributed on lazy tensors
"""
