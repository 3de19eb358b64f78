"""The images of a folder: which still need a caption, where it goes, and how a model sees them."""

from draft_helpers import photo
from PIL import Image

from captions.work import Folder, Picture, upright


def test_a_caption_that_is_there_stays_and_a_new_one_is_beside_its_image(tmp_path):
    for name in ("a.png", "b.png", "c.jpg", "d.png", ".hidden.png", "E.JPG"):
        photo(tmp_path / name)
    (tmp_path / "E.TXT").write_text("mine, too\n")
    (tmp_path / "a.txt").write_text("mine\n")
    (tmp_path / "b.txt").write_text(" \n")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")  # not text that we can read: left as it is
    work = Folder(tmp_path)
    assert [one.key for one in work.missing()] == ["b.png", "d.png"] and work.counts() == (3, 5)
    work.store(work.missing()[1], "a thing")
    assert (tmp_path / "d.txt").read_text() == "a thing\n" and work.counts() == (4, 5)
    assert [one.key for one in Folder(tmp_path).missing()] == ["b.png"], "the next job goes on there"
    assert len(Folder(tmp_path, rewrite=True).missing()) == 5


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
