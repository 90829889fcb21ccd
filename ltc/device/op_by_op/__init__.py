"""Calls that run at once, where recording them would not pay (see forks.py for when).

computed    what such a call has made, and the states that hold it
call_runs   a `Call` on PyTorch's kernels, or by its rule
unrecorded  a recording of which nothing is recorded: its inputs, its calls, its end
forks       when a recording goes on this way
"""
