"""Recurrent layers: one kernel walks through all steps, its text the same for any number of them.

recurrent_shape, weight_panels   what a kernel depends on; the recurrent weight packed once
state_product, time_walk         products of states with a panel; the loop over steps
cell_math                        what a cell does with the sums, and its gradient
scan_forward, scan_backward      the kernels; recurrence_codes says what they are called with
"""
