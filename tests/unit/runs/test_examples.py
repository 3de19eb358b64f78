"""The example photographs of a first run."""

import numpy as np
from PIL import Image

from runs.examples import LIGHTS, SIDE, TABLES, TRIGGER, write_examples


def test_each_photo_shows_what_its_caption_says(tmp_path):
    assert write_examples(tmp_path) == len(list(tmp_path.glob("*.png"))) == len(TABLES) == 8
    for number, (name, color) in enumerate(TABLES):
        side = LIGHTS[number % 2][0]
        caption = (tmp_path / f"red-ball-{number + 1}.txt").read_text()
        assert caption == f"{TRIGGER}, a shiny red ball on a {name} table, light from the {side}\n"
        with Image.open(tmp_path / f"red-ball-{number + 1}.png") as image:
            picture = np.asarray(image) / 255
            assert image.size == (SIDE, SIDE)
        assert np.allclose(picture[-1, 0], color, atol=0.05), "the table"
