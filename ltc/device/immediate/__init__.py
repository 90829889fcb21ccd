"""Calls that run when they are made, and are noted.

permission  whether calls may run so
computed    what such a call has made, and the states that hold it
call_runs   a `Call` on PyTorch's kernels, or by its rule
notes       the path that the calls took
immediate_session  a recording whose calls run: its inputs, its calls, its end
"""
