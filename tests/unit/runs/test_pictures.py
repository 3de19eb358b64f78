"""Pictures of other depths: their light and dark stay, and what was done to them is said."""

import numpy
import pytest
from PIL import Image

from runs import pictures


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([0, 40_000, 65_535], numpy.uint16, [0, 155, 255]),  # of the whole range
        ([0, 100, 256], numpy.uint16, [0, 0, 0]),  # dark, but above 8 bits: not made lighter
        ([0, 100, 200], numpy.uint16, [0, 127, 255]),  # 8 bits and fewer in 16: of their own brightest
        ([0.0, 0.5, 1.0], numpy.float32, [0, 127, 255]),
        ([0.0, 0.2, 0.4], numpy.float32, [0, 51, 102]),  # already from 0 to 1
        ([0.0, 500.0, 1000.0], numpy.float32, [0, 127, 255]),
    ],
)
def test_a_greyscale_image_of_more_bits_keeps_its_light_and_dark(values, kind, wanted):
    image = Image.fromarray(numpy.array([values], kind))
    assert list(pictures.eight_bits(image).get_flattened_data()) == wanted
