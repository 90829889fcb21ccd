"""The text of fused loop nests: one `ir.loop_nest` to one function.

context, arguments                what is handed down; the numbers that stay out of the text
coordinates, bounds_checks        where a point is; whether an index is inside
loads, values, stores             one point
nests, reductions, reduction_ops, one_hot_sums   loops around points
rows, transposed_rows, column_tiles              a row; groups and squares that are transposed
emitter, deduplicate              the whole function; equal ones are written once
"""
