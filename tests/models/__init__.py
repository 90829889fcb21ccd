"""Protocols between threads as small programs, of which a test tries every interleaving.

interleavings   the memory, and the search
thread_pool     the pool of ltc/llvm/native/thread_pool.py
shared_memory   messages and sums between processes: ltc/llvm/native/shared_counters.py
"""
