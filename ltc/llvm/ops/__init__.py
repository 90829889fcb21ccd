"""From a node to its generator.

dispatch          products and what is fused behind them
kernel_choice     the faster of generated kernels and a call of PyTorch's, measured once
product_choice    classes and trials of products, and of convolutions that are products
product_call      the calls, and what is fused behind them
conv_and_pool     convolutions and poolings
primitives        the rest, by a table: scans, scatters, copies, exchanges, torch's own kernels
"""
