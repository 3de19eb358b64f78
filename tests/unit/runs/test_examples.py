"""The example photographs of a first run."""

import numpy as np
from PIL import Image

from runs.examples import LIGHTS, SIDE, TABLES, TRIGGER, write_examples


def test_each_photo_shows_what_its_caption_says(tmp_path):
    assert write_examples(tmp_path) == len(list(tmp_path.glob("*.png"))) == len(TABLES) == 8
    balls = []
    for number, (name, color) in enumerate(TABLES):
        side = LIGHTS[number % 2][0]
        caption = (tmp_path / f"red-ball-{number + 1}.txt").read_text()
        assert caption == f"{TRIGGER}, a shiny red ball on a {name} table, light from the {side}\n"
        with Image.open(tmp_path / f"red-ball-{number + 1}.png") as image:
            picture = np.asarray(image) / 255
            assert image.size == (SIDE, SIDE)
        for row, light in ((0, 0.55), (101, 0.67), (103, 0.63), (255, 1.0)):  # the wall, its foot, the table, its front
            assert np.allclose(picture[row, 0], np.multiply(color, light), atol=0.05)
        red = (picture[..., 0] > 0.12) & (picture[..., 1:].max(-1) < 0.45 * picture[..., 0])
        rows, columns = np.nonzero(red)
        balls.append([red.mean(), columns.mean(), -rows.mean()])
        down, across = np.mgrid[0:SIDE, 0:SIDE]
        away = np.hypot(across - columns.mean(), down - rows.mean()) / np.sqrt(red.sum() / np.pi)
        bright = np.where(away < 1, picture.sum(-1), 0)
        top, shine = np.unravel_index(bright.argmax(), bright.shape)
        assert bright.max() > 2.6 and top < rows.mean() and (shine < columns.mean()) == (side == "left")
        # The share of the table's light: the shadow lies on the other side.
        share = np.where((away < 1.15) | (down < 150), 1, (picture / color).mean(-1))
        assert 0.3 < share.min() < 0.6 and (np.nonzero(share < 0.6)[1].mean() > columns.mean()) == (side == "left")
    assert (np.diff(balls, axis=0) > 0).all(), "each is larger, further right and further up"
