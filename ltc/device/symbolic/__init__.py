"""Recordings that come back at other sizes, as one path whose sizes are symbols.

pattern, derive      what two recordings have in common; the types that formulas derive from symbols
path, resizing_text  the entries, which take other sizes; the text that gives them these
going_on, taking_over  which path a recording goes on along, and how it leaves one for another
ending               what runs it
"""
