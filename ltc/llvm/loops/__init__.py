"""The text of fused loop nests: one `ir.loop_nest` to one function.

context                           what is handed down; the numbers that stay out of the text
coordinates, bounds_checks        where a point is; whether an index is inside
loads, values, stores             one point
nests, reduction_ops              loops around points
rows                              sums; a row with its sums of one term; groups that are transposed
emitter                           the whole function
"""
