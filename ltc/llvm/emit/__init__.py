"""The tools that every generator writes with.

builder, index                  one function's text; formulas of the numbers it counts with
vectors, memory_ops             vectors of one element type; loads and stores of any
dtype, conversions, isa         element types in memory and in registers; the processor
elementwise, float_ops, math_*  instructions and formulas of elementwise operations
philox, kernel_code             random bits; a finished text with its arguments
"""
