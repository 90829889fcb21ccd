"""Whether values are right: nodes in double precision, and what rounding may make of them."""
