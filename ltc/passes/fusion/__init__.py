"""Nodes grouped into loop nests.

index_maps  where operands are read       draft         a loop nest in the making
fuse        the grouping itself           column_sums   sums joined to the rows they add up
units       kernels and products in order, and what may be computed where
partial_updates  kernels of what they change of a value
in_place    where they may store over what they read
"""
