"""A data set as it is written, and errors in it, each with its file and key."""

import os
import shutil
import sys

import numpy
import pytest
import tomllib
from PIL import Image as Pillow
from trainer_helpers import flags, make_config, make_images

from trainer import validation
from trainer.arguments import parse
from trainer.buckets import Rules, place, resolutions
from trainer.dataset import Image, header_of, pixels_and_mask, read, rules_of
from trainer.errors import TrainError

ARGS = parse(flags("m", "d", "o", caption_extension=".txt"))


def test_a_data_set_is_read_as_it_is_written(tmp_path):
    folder = make_images(tmp_path / "images")
    (folder / "0.txt").write_text("\ufeffa caption,\u2028ünï 🎉\nsecond line", encoding="utf-8")
    config = make_config(tmp_path / "d.toml", folder)
    config.write_text(config.read_text(encoding="utf-8"), encoding="utf-8-sig")  # as Notepad of Windows may
    found = read(config, ARGS)
    assert [image.path.name for image in found] == [f"{i}.png" for i in range(5)]
    assert found[0].caption == "a caption,\u2028ünï 🎉"
    assert found[1].bucket == (80, 48) and found[2].bucket == (48, 80)
    assert all(pixels_and_mask(image)[0].shape == (image.bucket[1], image.bucket[0], 3) for image in found)


def test_a_turned_photograph_a_transparent_image_and_one_of_16_bits_are_seen_as_people_see_them(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    picture = Pillow.fromarray(numpy.full((48, 96, 3), 128, numpy.uint8))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(folder / "turned.jpg", exif=exif)
    Pillow.fromarray(numpy.zeros((64, 64, 4), numpy.uint8)).save(folder / "clear.png")
    Pillow.new("I;16", (64, 64), 40_000).save(folder / "sixteen.png", transparency=0)
    for name in ("turned", "clear", "sixteen"):
        (folder / f"{name}.txt").write_text("x", encoding="utf-8")
    clear, sixteen, turned = read(make_config(tmp_path / "d.toml", folder), ARGS)
    assert turned.bucket[0] < turned.bucket[1]
    assert pixels_and_mask(turned)[0].shape[:2] == turned.bucket[::-1]
    assert (pixels_and_mask(clear)[0] == 255).all()
    assert (pixels_and_mask(sixteen)[0] == 155).all()
    assert sixteen.deep and not clear.deep and not turned.deep


@pytest.mark.parametrize(
    "keys", ["resolution = 1100", "resolution = 768\nmax_bucket_reso = 999", "min_bucket_reso = 0"]
)
def test_buckets_are_multiples_of_their_steps_whatever_the_limits_are(tmp_path, keys):
    rules = rules_of(tmp_path / "d.toml", {"resolution": 512, "enable_bucket": True, **tomllib.loads(keys)}, ARGS)
    assert all(side > 0 and side % 64 == 0 for size in resolutions(rules) for side in size)


def test_without_buckets_and_below_a_step_of_theirs_an_image_is_scaled_to_cover():
    """All other sizes are placed as by sd-scripts: tests/upstream/ui/dataset/test_bucket_preview.py."""
    assert place(Rules((512, 512)), (1000, 500)) == ((512, 512), (1024, 512))
    assert place(Rules((512, 512), enable_bucket=True, bucket_no_upscale=True), (20, 10)) == ((64, 64), (128, 64))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_file_whose_name_is_not_utf8_is_shuffled_and_held_out_as_any_other(tmp_path):
    config = make_config(tmp_path / "d.toml", make_images(tmp_path / "images", 1))
    for suffix in (".png", ".txt"):
        shutil.copy(tmp_path / f"images/0{suffix}", os.fsencode(tmp_path / "images") + b"/caf\xe9" + suffix.encode())
    images = read(config, parse(flags("m", "d", "o", caption_extension=".txt", shuffle_caption=True)))
    assert [image.orders for image in images] == [("a thing number 0",)] * 2
    assert [len(part) for part in validation.split(images, 0.5, 1)] == [1, 1]


def test_without_a_separator_a_caption_is_one_tag(tmp_path):
    config = make_config(tmp_path / "d.toml", make_images(tmp_path / "images", 1))
    text = config.read_text(encoding="utf-8")
    config.write_text(f'{text}shuffle_caption = true\ncaption_separator = ""\n', encoding="utf-8")
    assert set(read(config, ARGS)[0].texts) == {"a thing number 0"}


def change(old: str, new: str):
    return lambda folder, config, text: config.write_text(text.replace(old, new), encoding="utf-8")


# what is done to a data set of two images: the message
BROKEN = [
    (lambda f, c, t: (f / "1.png").write_text("I am a text"), "1.png: Not a readable image. Export it as JPEG or PNG."),
    (lambda f, c, t: ((f / "1.png").unlink(), os.mkfifo(f / "1.png")), "1.png: not a regular file; remove it"),
    (lambda f, c, t: (f / "1.txt").unlink(), "1.png: no caption; write 1.txt beside it"),
    # a PNG of one colour: some KB on disk, 1.2 GB as pixels
    (lambda f, c, t: Pillow.new("1", (20000, 20000)).save(f / "1.png"), "as JPEG or PNG with fewer pixels, or"),
    (change('".txt"', '"txt"'), "0.png: no caption; write 0txt beside it"),
    (lambda f, c, t: (f / "1.txt").write_bytes("café".encode("latin-1")), "1.txt: not UTF-8 text"),
    (lambda f, c, t: (f / "1.txt").write_bytes("a thing".encode("utf-16-le")), "1.txt: not UTF-8 text; save the file"),
    (change("/images", "/nowhere"), "nowhere' does not exist; create it or fix the path"),
    (lambda f, c, t: [file.unlink() for file in f.iterdir()], "has no images (.png"),
    (change("num_repeats", "num_repeat"), "unknown key 'num_repeat'; did you mean num_repeats?"),
    (lambda f, c, t: c.write_text(t + "flip_aug = true\n"), "flip_aug = True: not supported"),
    (lambda f, c, t: c.write_text(t + 'keep_tokens_separator = "|||"\n'), "separator = '|||': not supported"),
    (change("bucket_reso_steps = 16", "bucket_reso_steps = 20"), "20 pixels: sizes must be multiples of 16"),
    (change("bucket_reso_steps = 16", "bucket_reso_steps = 80"), "bucket_reso_steps 80: too large for resolution 64"),
    (change("batch_size = 1", 'batch_size = "1"'), "batch_size = '1': must be a whole number"),
    (change("resolution = 64", "resolution = [64, 64, 64]"), "[64, 64, 64]: must be one number, or width and height"),
    (lambda f, c, t: c.write_text("datasets = [1]\n"), "[[datasets]] is 1; write a table"),
    (lambda f, c, t: c.write_bytes(f"# café\n{t}".encode("latin-1")), "d.toml: not UTF-8 text; save the file as"),
    (lambda f, c, t: c.write_text("[[datasets"), "not valid TOML"),
    (lambda f, c, t: c.write_text("a = " + 2000 * "["), "not valid TOML"),
    (lambda f, c, t: c.unlink(), "No such file"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_a_wrong_data_set_is_refused_by_name(tmp_path, damage, message):
    folder = make_images(tmp_path / "images", 2)
    config = make_config(tmp_path / "d.toml", folder)
    damage(folder, config, config.read_text(encoding="utf-8"))
    with pytest.raises(TrainError) as error:
        read(config, ARGS)
    assert message in str(error.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_every_error_of_a_damaged_image_names_the_file(tmp_path, kind):
    """Bytes flipped and cut at random: Pillow has a dozen errors for it."""
    draw = numpy.random.default_rng(5)
    file = tmp_path / f"damaged.{kind.lower()}"
    picture = Pillow.fromarray(draw.integers(0, 255, (48, 64, 3), dtype=numpy.uint8))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(file, format=kind, exif=exif)
    original, refused = file.read_bytes(), 0
    for _ in range(150):
        data = bytearray(original)
        for at in draw.geometric(1 / 80, size=draw.integers(1, 6)):
            data[min(at, len(data) - 1)] = draw.integers(256)
        file.write_bytes(data[: draw.integers(len(data))] if draw.random() < 0.2 else data)
        try:
            pixels_and_mask(Image(file, "", 1, (48, 64), header_of(file)[0], 0, 1))
        except TrainError as problem:
            refused += 1
            assert str(file) in str(problem)
    assert refused > 15
