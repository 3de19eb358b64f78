"""Photographs and captions as people have them: formats, EXIF, sizes, duplicates, encodings, limits."""

import errno
import os
import random
import struct
from unittest.mock import Mock

import pytest
from draft_helpers import camera_exif, captions, drop, item_of, limits, note, photo, run_of
from PIL import Image
from runs_helpers import picture

import presets
import runs
from runs import pictures
from ui.dataset import draft, draft_images, image_edit

# HEIC has a decoder of its own, which turns the image itself.
TURNED = [("jpg", n) for n in range(1, 9)] + [("heic", 3)]
TURNED += [(suffix, 6) for suffix in ("heic", "png", "webp", "tif", "avif")]


@pytest.mark.parametrize(("suffix", "orientation"), TURNED)
def test_exif_orientation_is_applied_to_size_thumbnail_and_data_set(data, mine, tmp_path, suffix, orientation):
    pictures.add_heif()
    path = picture(tmp_path / f"t.{suffix}", size=(800, 400), exif=camera_exif(orientation).tobytes())
    assert drop(mine, path) == (1, [])
    (item,) = draft.items(mine)
    size = (800, 400) if orientation < 5 else (400, 800)
    assert (item.width, item.height) == size
    run_of(mine)
    (taken,) = runs.images_in(data / "datasets/my-lora")
    red = {1: (0, 0), 2: (1, 0), 3: (1, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}[orientation]
    for file in (draft.thumb(mine, item), taken):
        with Image.open(file) as image:
            width, height = image.size
            assert width / height == size[0] / size[1] and image.getexif().get(0x0112, 1) == 1
            pixel = image.convert("RGB").getpixel((4 + red[0] * (width - 8), 4 + red[1] * (height - 8)))
            assert pixel[0] > 180 and pixel[1] < 80 and pixel[2] < 80, (file, pixel)
            assert image.format == "JPEG" or suffix not in ("heic", "avif"), "no trainer reads it"


@pytest.mark.parametrize(("orientation", "crop"), [(6, (0, 0, 0.25, 1)), (8, (0.75, 0, 1, 1))])
def test_a_photo_that_is_rotated_twice_is_flagged_and_turned_upright(data, mine, tmp_path, orientation, crop):
    """A program rotated the pixels upright and kept the orientation of the camera."""
    drop(mine, picture(tmp_path / "twice.jpg", size=(400, 600), quality=95, exif=camera_exif(orientation, 600, 400)))
    drop(mine, picture(tmp_path / "camera.jpg", size=(600, 400), exif=camera_exif(6, 600, 400)))
    assert "sideways" not in item_of(mine, "camera.jpg").warnings, "an honest photo"
    draft.remove(mine, [item_of(mine, "camera.jpg").id])
    item = item_of(mine, "twice.jpg")
    assert "sideways" in item.warnings and (item.width, item.height) == (600, 400)
    image_edit.rotate(mine, item.id)
    fixed = item_of(mine, "twice.jpg")
    assert fixed.id == item.id and "sideways" not in fixed.warnings and (fixed.width, fixed.height) == (400, 600)
    run_of(mine)
    (taken,) = runs.images_in(data / "datasets/my-lora")
    for file in (draft.thumb(mine, fixed), draft.large(mine, fixed.id), taken):
        with Image.open(file) as image:
            assert image.width < image.height and image.getpixel((4, 4))[0] > 180, "red is top left, as in the camera"
    draft.undo(mine)
    assert "sideways" in item_of(mine, "twice.jpg").warnings
    image_edit.crop(mine, item.id, [0, 0, 1, 0.25])
    image_edit.rotate(mine, item.id)
    assert item_of(mine, "twice.jpg").crop == crop


def test_a_thumbnail_that_a_full_disk_does_not_take_leaves_no_part_of_it(tmp_path, monkeypatch):
    path = photo(tmp_path / "a.png")
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(runs.RunError, match="cannot write a thumbnail: the disk is full"):
        draft_images.write_picture(path, tmp_path / "thumbs" / "a-480-x.jpg", 480, 0, None)
    assert [*(tmp_path / "thumbs").iterdir()] == []


def test_near_images_are_those_of_comparing_all_with_all():
    draw = random.Random(3)
    bases = [(draw.getrandbits(64), draw.randbytes(12)) for _ in range(100)]
    hashes = []
    for n in range(400):
        bits = bases[n % 100][0]
        for place in draw.sample(range(64), draw.randrange(8)):
            bits ^= 1 << place
        hashes.append(bits)
    given = [(f"{n}", f"{bits:016x}{bases[n % 100][1].hex()}") for n, bits in enumerate(hashes)]
    flat = [(f"flat {tone}", f"{0:016x}{bytes([tone] * 12).hex()}") for tone in (0, 24, 49)]  # no lines, other colours
    found = draft_images.near_of((*given, *flat))
    assert found.get("flat 24") == "flat 0" and "flat 49" not in found
    most = presets.defaults()["images"]["near_bits"]
    for n, own in enumerate(hashes):
        near = [k for k in range(n) if f"{k}" not in found and (hashes[k] ^ own).bit_count() <= most]
        assert (f"{n}" in found) == bool(near)


def test_a_caption_that_is_too_long_is_explained_and_its_image_is_added(mine, tmp_path):
    added, messages = drop(mine, photo(tmp_path / "a.png"), note(tmp_path / "a.txt", "x" * 30_000))
    assert added == 1 and messages == ["a.txt: the caption has 30000 characters; shorten it to 20000"]
    assert captions(mine) == {"a.png": ""}


def test_the_limits_of_a_file_and_a_draft_are_those_of_the_table(mine, tmp_path, monkeypatch):
    files = [photo(tmp_path / f"{n}.png", n) for n in range(4)]
    limits(monkeypatch, max_images=2)
    added, messages = drop(mine, *files)
    assert added == 2 and len(messages) == 1 and "A LoRA can have 2 images or" in messages[0]
    limits(monkeypatch, max_draft_mb=0)
    assert drop(mine, files[2])[0] == 0
    limits(monkeypatch, max_file_mb=0)
    _, (message,) = drop(mine, files[3])
    assert "3.png: 0 MB is too large; export it with at most 0 MB" in message
    assert not list(draft.folder(mine).glob(".new-*"))


def test_only_decoders_of_images_see_a_dropped_file(mine, tmp_path):
    """Pillow's decoder of EPS starts Ghostscript, and an icon of 16 pixels can hold a PNG of 170 megapixels."""
    path, icon = tmp_path / "x.png", photo(tmp_path / "y.ico")
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(/etc/passwd) run\n%%EOF")
    _, messages = drop(mine, path, icon)
    assert messages == [f"{name}: Not a readable image. Export it as JPEG or PNG." for name in ("x.png", "y.ico")]


TAGS = {"width": 256, "compression": 259, "samples per pixel": 277}  # of a TIFF


@pytest.mark.parametrize("damaged", TAGS)
def test_of_a_tiff_only_the_first_frame_counts(mine, tmp_path, damaged):
    """The second is not even read: a file of 34 MB can have 300,000, and Pillow's time grows by their square."""
    path = tmp_path / "x.tif"
    Image.new("RGB", (24, 16)).save(path, save_all=True, append_images=[Image.new("RGB", (24, 16), "red")])
    content = bytearray(path.read_bytes())
    (table,) = struct.unpack_from("<L", content, 4)
    (table,) = struct.unpack_from("<L", content, table + 2 + 12 * struct.unpack_from("<H", content, table)[0])
    entries = range(table + 2, table + 2 + 12 * struct.unpack_from("<H", content, table)[0], 12)
    (entry,) = (at for at in entries if struct.unpack_from("<H", content, at)[0] == TAGS[damaged])
    at, value = (entry, 65_000) if damaged == "width" else (entry + 8, 999)  # no width; a value that nobody knows
    struct.pack_into("<H", content, at, value)
    path.write_bytes(content)
    assert drop(mine, path) == (1, []) and "only the first frame is used" in draft.items(mine)[0].changes
