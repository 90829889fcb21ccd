"""Sizes that are numbers now and expressions of symbols at other sizes.

called_by_sizes  what expressions may call
extent     an expression with its value, and the guards under which decisions by it hold
choices    what is decided of sizes without a guard
marks      sizes in text
as_json    expressions and what was decided, as JSON
"""
