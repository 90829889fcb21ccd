"""Reasons for what costs time, found when it happens; `ltc/explaining/` keeps and prints them.

forks_explained  the call that was expected on a path, and the one that came
cuts_explained   side exits; steps that ended before their mark; calls that were not recorded
misplaced        the name of a tensor on another device: the parameter, attribute or variable
reads_explained  reads of pending values, with the cure for the kind of loop
new_programs     why a program is new
hints            the line on stderr where a loop is slower than eager PyTorch
nan_reads        the line on stderr where a number that is read is NaN
transitions      from one state of a step to the next, printed only
"""
