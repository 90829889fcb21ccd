"""Machine code at work.

parallel_compile, kernel_cache   kernels compiled side by side, kept by name
kernel_run, runner               a list of kernels run by one native call
thread_pool, launch_ring         the threads that share its tasks; launches without Python
"""
