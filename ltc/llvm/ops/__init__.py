"""From a node to its generator.

dispatch          products and what is fused behind them
conv_and_pool     convolutions and poolings
primitives        the rest, by a table: scans, scatters, copies, exchanges, torch's own kernels
"""
