"""Nodes grouped into loop nests.

index_maps  where operands are read       draft         a loop nest in the making
legality    what may be computed where    column_sums   sums joined to the rows they add up
repeated    what each reader makes again  fuse          the grouping itself
body        a finished draft's values     units         kernels and products, in order
partial_updates  kernels of what they change of a value
in_place    where they may store over what they read
"""
