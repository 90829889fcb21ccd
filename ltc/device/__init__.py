"""How a torch tensor on `ltc` behaves.

torch_api   every private name of torch that these folders use
shapes      what a call gives, without running it
recording   calls recorded, compared with the last step, ended and started
ops         kernels that no schema describes
hooks       what torch's Python code asks of a device
register    all of it handed to torch, once
"""
