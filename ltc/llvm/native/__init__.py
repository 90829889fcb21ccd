"""Machine code at work.

parallel_compile, kernel_cache   kernels compiled side by side, kept by name
kernel_run, runner               a list of kernels run by one native call
futex                            how a thread waits for another one
thread_affinity, thread_pool     the threads that share its tasks, and where they run
launch_ring                      launches without Python
"""
