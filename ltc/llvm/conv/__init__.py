"""The generator of convolutions and their gradients.

geometry, axes, split_images   what is asked for; windows; partial sums over images
nchw*                          channels outermost, as torch has them
nhwc*                          channels last, as programs prefer them
winograd*                      the same, of 3x3 taps, by transformed tiles
"""
