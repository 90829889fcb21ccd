"""Types of results without running the call.

meta              the choice of a source: a small call the CPU's kernel, a large one torch's Meta kernel
cpu_probe         a small call on stand-in values
numbers_that_fit  numbers that a kernel converts to a dtype, and refuses
"""
