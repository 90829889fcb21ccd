"""How a torch tensor on `ltc` behaves.

torch_device  the device type that torch is given
call_observer  what one call does besides recording
random_state  which seed a draw takes
versions    what a call writes to is counted, for autograd
shapes      what a call gives, without running it
op_by_op    calls that run when they are made
recording   calls recorded, compared with the last step, ended and started
ops         kernels that no schema describes
dynamo      torch.compile, whose graphs are recorded
hooks       what torch's Python code asks of a device
register    all of it handed to torch, once
"""
