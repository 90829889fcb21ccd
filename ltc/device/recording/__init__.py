"""A step as a path of calls: noted, followed, ended.

state, signature                 the value of a tensor; the arguments of an overload
entries                          the entries of paths, a tree
recorder, fast_path, slow_path   the recording; a call on the path; a new call
run_now, at_once_lines           an immediate call; the lines of a kernel that makes one
views, strides                   views of a base; their strides on the CPU
gradient_views, run_backward     views that a backward makes; what is done behind one
collective_calls, fallback       exchanges among replicas; eager fallbacks
tracks                           paths that the core follows
sync, exit_liveness, tensors     the end of a recording; its outputs; reads and uploads
"""
