"""Programs whose sizes are symbols: planned once, made ready for other sizes by filling numbers in.

numbers_of   which numbers of a plan are expressions
resizable    a program that gives one for each size
saved_resizable  such programs in the disk cache
"""
