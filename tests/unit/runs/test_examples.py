"""The example photographs of a first run."""

from PIL import Image

from runs.examples import SIDE, TRIGGER, write_examples


def test_the_example_photos_have_captions_with_the_trigger_word(tmp_path):
    count = write_examples(tmp_path)
    images = sorted(tmp_path.glob("*.png"))
    assert len(images) == count == 8
    seen = set()
    for path in images:
        with Image.open(path) as image:
            assert image.size == (SIDE, SIDE)
            seen.add(image.tobytes())
        assert path.with_suffix(".txt").read_text().startswith(f"{TRIGGER}, ")
    assert len(seen) == count
