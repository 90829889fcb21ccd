"""How the loops of a nest are to run: decided before a line of its text is written.

iteration_space                   the nest in as few variables as it needs
vector_axis, open_extents         which variable runs over lanes; which extents the text leaves open
row_groups, one_hot, kept_rows    rows that are transposed, sums of one term, rows computed once
loop_schedule, work_items         all of it together; the work as threads share it out
"""
