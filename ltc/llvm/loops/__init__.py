"""The generator of fused loop nests: one `ir.loop_nest` to one function.

iteration_space, arguments          its variables, and the numbers that stay out of the text
values, loads_stores, bounds_checks one point of it
nests, reductions, reduction_ops, one_hot_sums, transposed_rows   loops around points
emitter, deduplicate                the whole function; equal ones are written once
"""
