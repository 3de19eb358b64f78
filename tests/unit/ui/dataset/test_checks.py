"""What "Check images" finds, and how each finding is fixed and the fix undone."""

import pytest
from draft_helpers import camera_exif, item, shot
from PIL import Image, ImageFilter

from runs.pictures import decoded
from ui.dataset import checks, draft_images


@pytest.mark.parametrize("name", ["astronaut.png", "chelsea.png"])
def test_a_photo_is_fine_and_its_blurred_and_dark_versions_are_not(tmp_path, name):
    def judged(image: Image.Image, cut: bool = False, **save) -> list[str]:
        path = tmp_path / f"x.{save.get('format', 'png').lower()}"
        image.save(path, **save)
        if cut:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] + b"\xff\xd9")
        looks = draft_images.measured(path, path.name, tmp_path / "copy")["looks"]
        return list(checks.of_item(item("x", *image.size, looks=looks), None, ""))

    image = shot(name)
    image.thumbnail((512, 512))
    assert judged(image) == [] == judged(image, format="JPEG", quality=85)
    assert judged(image, cut=True, format="JPEG") == ["cut"]
    assert judged(image.filter(ImageFilter.GaussianBlur(4))) == ["blurred"]
    large = image.resize((image.width * 3, image.height * 3), Image.Resampling.BICUBIC)
    assert judged(large) == [], "sharp enough at the size that is compared"
    assert "dark" in judged(image.point(lambda value: value * 0.1))


def test_what_is_converted_is_what_the_data_set_converts(tmp_path):
    """Beside the rotation by EXIF data."""
    photo_ = shot("chelsea.png")
    photo_.save(tmp_path / "upright.jpg")
    photo_.save(tmp_path / "exif.jpg", exif=camera_exif(6))
    photo_.convert("CMYK").save(tmp_path / "cmyk.jpg")
    photo_.convert("RGBA").save(tmp_path / "opaque.png")
    photo_.convert("P").save(tmp_path / "palette.png")
    clear = photo_.convert("RGBA")
    clear.putalpha(100)
    clear.save(tmp_path / "alpha.png")
    photo_.convert("L").save(tmp_path / "grey.png")
    Image.new("I;16", (64, 64), 40_000).save(tmp_path / "sixteen.png")
    photo_.save(tmp_path / "moving.webp", save_all=True, append_images=[photo_.rotate(90)], lossless=True)
    for path in sorted(tmp_path.iterdir()):
        changes, why = draft_images.measured(path, path.name, tmp_path / "copy")["changes"], decoded(path)[2]
        assert bool(changes) == bool(why) or why == "rotated upright", (path.name, changes, why)


def test_captions():
    for captions, kinds in (
        (["ohwx, a cat on a mat", "a dog", "OHWX sits"], {"no_trigger": [1]}),
        (["an ohwxen"], {"no_trigger": [0]}),
        (["", " "], {"no_caption": [0, 1]}),
        (["ohwx, solo, smile, hat", "ohwx, red, blue, 1girl", "ohwx, dog, cat, sky"], {}),
    ):
        empty = [() if text.strip() else ("no_caption",) for text in captions]
        items = [item(f"{n}", 600, 600, caption=text, warnings=empty[n]) for n, text in enumerate(captions)]
        got = checks.findings(items, [], "ohwx")
        assert {kind: [int(one.id) for one in some] for kind, some in got.items()} == kinds
    some = checks.KINDS["no_caption"].heading(1200)
    assert (some["title"], some["fix_all"]) == ("Without a caption: 1,200", "Use the trigger word (all 1,200)")
    assert checks.KINDS["dark"].heading(1)["fix_all"] == "Remove"
