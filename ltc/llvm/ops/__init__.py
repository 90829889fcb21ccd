"""From a node to its generator.

dispatch          products and what is fused behind them
product_choice    whether a matrix product is generated or PyTorch's own is called
product_call      the calls, and what is fused behind them
conv_and_pool     convolutions and poolings
primitives        the rest, by a table: scans, scatters, copies, exchanges, torch's own kernels
"""
