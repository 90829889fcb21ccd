"""Text of native kernels and what runs them.  In the order a node meets the folders:

ops                                        which generator a node goes to
loop_schedule                              how the loops of a nest are to run
loops, gemm, conv, pooling, attention, recurrence   the generators
emit                                       instructions, vectors and formulas that all of them write
compiler                                   text to machine code, and objects back from disk
native                                     kernels in memory, the thread pool
"""
