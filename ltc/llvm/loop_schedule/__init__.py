"""The schedule of a nest's loops: decided before a line of its text is written.

iteration_space            the nest in as few variables as it needs
vector_axis, open_extents  the variable that runs over lanes; the extents that the text leaves open
row_groups, kept_rows      rows that are transposed; rows computed once
loop_schedule              all of these together; the work that threads share
"""
