"""Pictures are opened within limits, made the same for every trainer, turned and cropped, and each change is named."""

import errno
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest
from draft_helpers import limits
from PIL import Image, ImageDraw
from runs_helpers import picture, png_header
from ui_helpers import PROJECT

from runs import pictures
from runs.files import RunError


def test_a_greyscale_image_of_more_bits_keeps_its_light_and_dark():
    for values, kind, wanted in (
        ([0, 40_000, 65_535], numpy.uint16, [0, 155, 255]),  # of the whole range
        ([0, 100, 256], numpy.uint16, [0, 0, 0]),  # dark, but above 8 bits: not made lighter
        ([0, 100, 200], numpy.uint16, [0, 127, 255]),  # 8 bits and fewer in 16: of their own brightest
        ([0.0, 0.5, 1.0], numpy.float32, [0, 127, 255]),
        ([0.0, 0.2, 0.4], numpy.float32, [0, 51, 102]),  # already from 0 to 1
        ([0.0, 500.0, 1000.0], numpy.float32, [0, 127, 255]),
    ):
        image = Image.fromarray(numpy.array([values], kind))
        assert list(pictures.eight_bits(image).get_flattened_data()) == wanted


def test_what_was_done_to_an_image_is_said_and_it_is_saved_in_a_format_that_every_trainer_reads(tmp_path):
    for file, mode, options, wanted in (
        ("a.jpg", "RGB", {}, (".jpg", "", (96, 64))),
        ("a.webp", "RGB", {"turn": 4, "crop": (0, 0, 1, 1)}, (".webp", "", (96, 64))),
        ("a.jpg", "CMYK", {"turn": 1}, (".jpg", "converted from CMYK to RGB, rotated", (64, 96))),
        ("a.bmp", "L", {"crop": (0.25, 0, 1, 0.5)}, (".png", "cropped", (72, 32))),
        ("a.gif", "RGB", {"turn": 2}, (".png", "GIF saved as PNG, converted from P to RGB, rotated", (96, 64))),
        ("a.jpg", "RGB", {"mask": Image.new("L", (48, 32), 200)}, (".png", "mask added", (96, 64))),
        ("a.avif", "RGB", {}, (".jpg", "AVIF saved as JPEG", (96, 64))),
        ("a.png", "RGBA", {}, (".png", "transparency replaced by white", (96, 64))),
        ("a.tif", "F", {}, (".png", "TIFF saved as PNG, converted to 8 bits per channel", (96, 64))),
    ):
        image, suffix, why = pictures.decoded(picture(tmp_path / file, mode=mode), **options)
        assert (suffix, why, image.size) == wanted and pictures.is_image_name(Path(file.upper()))
        assert image.mode == ("RGBA" if "mask" in options else "L" if mode in "LF" else "RGB")
        if "mask" in options:
            assert image.getpixel((0, 0)) == pytest.approx((254, 0, 0, 200), abs=3)


MEASURED = """
import resource, sys, pathlib
from runs import pictures
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pictures.decoded(pathlib.Path(sys.argv[1]), crop=(0, 0, 0.1, 0.1))  # loads the decoder
before = used()
pictures.decoded(pathlib.Path(sys.argv[2]))
print((used() - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_a_large_transparent_image_needs_the_memory_of_two_copies_because_eight_are_converted_at_once(tmp_path):
    paths = [tmp_path / "small.png", tmp_path / "large.png"]
    for path, side in zip(paths, (10, 4000), strict=True):
        Image.new("RGBA", (side, side), (255, 0, 0, 128)).save(path)
    used = subprocess.check_output([sys.executable, "-c", MEASURED, *paths], cwd=PROJECT)
    assert int(used) < 2.5 * 4 * 4000 * 4000


def test_a_picture_that_cannot_be_used_is_named_with_what_to_do(tmp_path, monkeypatch):
    limits(monkeypatch, max_side=100, max_megapixels=0.007)
    with pictures.opened(picture(tmp_path / "a.png", size=(100, 70)), "a.png") as image:
        assert image.size == (100, 70)
    (tmp_path / "bomb.png").write_bytes(png_header(30_000, 30_000))
    (tmp_path / "wide.png").write_bytes(png_header(101, 10))  # refused before it is decoded
    (tmp_path / "area.png").write_bytes(png_header(100, 71))
    (tmp_path / "text.png").write_text("words")
    os.mkfifo(tmp_path / "pipe.png")
    cut = picture(tmp_path / "cut.png")
    cut.write_bytes(cut.read_bytes()[:90])
    scans = picture(tmp_path / "scans.jpg", progressive=True)
    whole = scans.read_bytes()
    scans.write_bytes(whole[:-2] + whole[whole.rfind(pictures.SCAN) : -2] * 200 + whole[-2:])
    large = "too large; scale it down to at most 100 pixels per side and 0.007 megapixels"
    for path, says in (
        (tmp_path / "wide.png", f"wide.png: 101 × 10 pixels is {large}"),
        (tmp_path / "area.png", f"area.png: 100 × 71 pixels is {large}"),
        (tmp_path / "bomb.png", f"bomb.png: The image is {large}"),
        (tmp_path / "pipe.png", "pipe.png: not a regular file; remove "),
        (tmp_path / "text.png", "text.png: Not a readable image. Export it as JPEG or PNG."),
        (cut, "cut.png: the image is damaged ("),
        (scans, "scans.jpg: a JPEG with more than 200 scans takes too long; export it again"),
    ):
        with pytest.raises(RunError) as caught:
            pictures.decoded(path)
        assert str(caught.value).startswith(says)
    monkeypatch.setattr("PIL.Image.open", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(RunError, match=r"a.png: Input/output error; check the file .*a.png"):
        pictures.decoded(tmp_path / "a.png")


def test_a_crop_has_at_least_one_pixel_and_all_are_inside():
    for crop, box in (
        ((0, 0, 1, 1), (0, 0, 100, 50)), ((0.25, 0.5, 0.75, 1), (25, 25, 75, 50)), ((1, 1, 1, 1), (99, 49, 100, 50)),
        ((0.5, 0.5, 0.5, 0.5), (50, 25, 51, 26)),
    ):  # fmt: skip
        assert pictures.crop_box((100, 50), crop) == box
        assert pictures.cropped_size((100, 50), crop) == (box[2] - box[0], box[3] - box[1])


def test_a_crop_of_a_turned_image_shows_the_same_pixels(tmp_path):
    image, crop = Image.new("RGB", (40, 20)), (0.1, 0.2, 0.5, 0.9)
    ImageDraw.Draw(image).polygon([(0, 0), (40, 3), (9, 20)], fill="red")
    for turn in range(-1, 6):
        turned = pictures.turned(image, turn)
        inside = turned.crop(pictures.crop_box(turned.size, pictures.turned_crop(crop, turn) or crop))
        assert inside == pictures.turned(image.crop(pictures.crop_box(image.size, crop)), turn)
    assert pictures.turned(image, 1).getpixel((19, 0)) == (255, 0, 0), "clockwise: the upper left is at the right"
    assert pictures.turned_crop(None, 1) is None


def test_a_crop_from_outside_is_four_numbers_that_enclose_an_area():
    assert pictures.valid_crop(None) is pictures.valid_crop([0, 0, 1, 1]) is None
    assert pictures.valid_crop([0, 0.1, 0.50000001, 1]) == (0, 0.1, 0.5, 1)
    for wrong in ([0, 0, 1], ["0", 0, 1, 1], [True, 0, 1, 1], 3):
        with pytest.raises(RunError, match="four numbers"):
            pictures.valid_crop(wrong)
    for wrong in ([0.5, 0, 0.5, 1], [0, 0.7, 1, 0.6], [0, 0, 1, 1.1], [-0.1, 0, 1, 1], [0, 0, math.nan, 1]):
        with pytest.raises(RunError, match="no area"):
            pictures.valid_crop(wrong)
