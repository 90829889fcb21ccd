"""Recordings that come back at other sizes, as one path whose sizes are symbols.

In the order in which a recording meets them:
path_selection   which path of symbols it goes along, makes with an earlier recording, or leaves; the program that it
                 ends with: one for all sizes, in runtime/program_of_sizes.py
pattern, derive  what two recordings have in common; the types of its calls, by their rules
path             the entries, and the text that gives them the sizes of a call
"""
