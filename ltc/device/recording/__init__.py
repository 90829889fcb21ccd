"""A step as a path of recorded calls.

user_line, state, signature      where a call was made, what a tensor is, what a schema says
recorder, fast_path, slow_path   the path; a call seen before; a call that is new
run_now, at_once_lines           a call that runs when it is made; what a kernel has of that
views, gradient_views            what a view is derived from; those that a backward makes
collective_calls, fallback       exchanges among replicas; calls that cannot wait
sync, exit_liveness, tensors     when a recording ends, with which outputs; reads and uploads
"""
