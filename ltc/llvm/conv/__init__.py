"""The generator of convolutions and their gradients.

geometry, axes, split_images   what is asked for; windows; partial sums over images
nchw*                          channels outermost, as torch has them
nhwc*                          channels last, as programs prefer them
"""
