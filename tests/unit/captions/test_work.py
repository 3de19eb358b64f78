"""How a model sees an image."""

from PIL import Image

from captions.work import Picture, upright


def test_a_picture_is_seen_as_it_is_trained(tmp_path):
    """A red left half and a transparent right one; a quarter turn clockwise brings the left to the top."""
    image = Image.new("RGBA", (40, 20))
    image.paste((255, 0, 0, 255), (0, 0, 20, 20))
    image.save(tmp_path / "a.png")

    def seen(*how) -> tuple:
        shown = upright(Picture("a", "a.png", tmp_path / "a.png", *how))
        return shown.size, shown.getpixel((2, 2)), shown.getpixel((shown.width - 3, shown.height - 3))

    red, white = (255, 0, 0), (255, 255, 255)
    assert seen() == ((40, 20), red, white)
    assert seen(1) == ((20, 40), red, white)
    assert seen(1, (0.0, 0.5, 1.0, 1.0)) == ((20, 20), white, white)
