"""Recurrent layers: one kernel walks through all steps, its text the same for any number of them.

recurrent_shape, weight_panels   what a kernel depends on; the recurrent weight packed once, and products with it
cell_math                        what a cell does with the sums, and its gradient
recurrence_codes                 the loop over steps, the kernels, what they are called with
"""
