"""The behaviour of a torch tensor on `ltc`.

torch_device    the device type that torch gets
call_observer   the effects of a call besides its recording
random_state    the seeds of draws
versions        the count of writes to a tensor, for autograd
shapes          the types of a call's results, without running it
evidence        the reasons for cuts, side exits and new programs, for ltc.explain
symbolic        paths that come back at other sizes
policy          the decision how a recording runs
immediate       calls that run when they are made, and are noted
recording       calls recorded, compared with the followed path, ended and started
ops             kernels that no schema describes
dynamo          torch.compile, with graphs that are recorded
hooks           answers to torch's Python code about the device
core_seam       the questions that the C++ core and Python ask each other
register        registration of all this with torch, once

user_line, call_place, timed_calls   the line and the module of a call; the time that it takes
storage_sharing                      bytes that tensors share
"""
