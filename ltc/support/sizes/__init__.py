"""Sizes that are numbers now and expressions of symbols at other sizes.

extent     an expression with its value, and the guards under which decisions by it hold
choices    decisions on sizes without a guard
marks      sizes in text
as_json    expressions and guards as JSON
"""
