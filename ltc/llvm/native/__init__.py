"""Machine code at work.

kernel_cache                     kernels compiled side by side, kept by name
kernel_run, runner               a list of kernels run by one native call
named_blocks, futex              text that threads run together; how one waits for another
thread_pool                      the threads that share its tasks
shared_counters                  by which processes that share memory wait for each other
"""
