"""Checks of values: nodes in double precision, and the errors that rounding may cause."""
