"""The sums that a channels-last convolution keeps in registers together."""

import pytest

from ltc.llvm.conv.axes import forward_axes
from ltc.llvm.conv.nhwc_tile import tile_shape
from ltc.llvm.emit.isa import AVX2, AVX512


def tile_of(extent, channels, isa, images=1):
    axes = forward_axes((extent,) * 2, (3, 3), (extent,) * 2, (1, 1), (1, 1), (1, 1))
    return tile_shape(axes, channels, isa, isa.lanes(4), images, images)


@pytest.mark.parametrize("isa", [AVX2, AVX512], ids=lambda isa: isa.name)
@pytest.mark.parametrize("extent, channels", [(56, 64), (28, 128), (14, 256), (32, 64)])
def test_a_tile_multiplies_more_often_than_it_loads(extent, channels, isa):
    tile = tile_of(extent, channels, isa)
    for width, _ in tile.widths:
        products, loads = width * tile.height * tile.vectors, width * tile.height + tile.vectors
        assert products >= 1.25 * loads, "loads wait for one another's banks of the cache"


@pytest.mark.parametrize("isa", [AVX2, AVX512], ids=lambda isa: isa.name)
def test_a_tile_of_small_images_is_of_several(isa):
    assert tile_of(4, 512, isa, images=32).across_images
