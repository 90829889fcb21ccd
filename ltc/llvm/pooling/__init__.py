"""The generator of pooling windows, forward and backward, channels outermost (nchw) or last (nhwc)."""
