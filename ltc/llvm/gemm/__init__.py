"""The generator of matrix products.

blocking       panels, tiles and the way to go      packing    operands in the order of their use
microkernel    the innermost block in registers     product_loops   the loops around it
kernel         a product as a kernel and its tasks
"""
