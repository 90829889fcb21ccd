"""Graphs as XLA programs, through JAX's public API: every device that has a PJRT plug-in.

start           finds JAX; imports nothing of it before the backend is asked for
xla_backend     the devices, and what the backend offers
computation     a graph compiled and launched; its buffers
compiled_graph  the function that JAX compiles: rows, faults, and what may be written over
joint_computation   one program of all replicas, which exchange in it
placement       one device, or the mesh of the replicas' devices
early_checks    checks of what a program is given, made ahead
fault_word      what values a program refuses
lowering        the table: primitive -> row, and which dtypes rows take
..._rows        the rows
numbers         dtypes, and tensors to and from arrays
"""
