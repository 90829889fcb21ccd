"""Compiled graphs at run time; no torch dispatch.

compile, program_cache    from recorded calls to a program; those that are kept
program_of_sizes          one program for all sizes
first_runs, background    a program that is not compiled yet, and the process that compiles it
graph_compiler, partition a graph as the backend's computation; what the backend leaves to PyTorch; one program of all
                          replicas, where theirs are the same
program, executor         a launch, in the calling thread or in the device's own
buffer, account           memory of tensors, and how much of it there is
transfers, physical_dtype host memory to and from a device; other dtypes there
salvage, backend_errors   values that do not need what failed; errors with the user's line
verification, dump        programs compared with the reference; graphs in a file
core_reservation          a processor for steps while a program is compiled
"""
