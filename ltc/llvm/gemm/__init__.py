"""The generator of matrix products.

blocking       panels, tiles and the way to go      packing    operands in the order of their use
microkernel    the innermost block in registers     kernel     the loops around it
autotune, timing   LTC_AUTOTUNE=1: several blockings measured
"""
