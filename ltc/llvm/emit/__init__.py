"""What every generator writes with.

builder, vectors, memory_ops    one function's text; vectors; loads and stores
dtype, conversions, isa         element types in memory and in registers; the processor
elementwise, float_ops, math_*  instructions and formulas of elementwise operations
philox, kernel_code             random bits; a finished text with its arguments
"""
