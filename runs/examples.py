"""Example photographs with captions, for a first run that needs no images of the user's own.

They are computed, so that nothing has to be downloaded or licensed: a lit red ball on tables of several colours.
"""

from pathlib import Path

SIDE = 256  # pixels
TRIGGER = "r3dball"
TABLES = (
    ("blue", (0.16, 0.33, 0.62)),
    ("green", (0.20, 0.50, 0.27)),
    ("yellow", (0.90, 0.76, 0.25)),
    ("grey", (0.55, 0.57, 0.60)),
    ("purple", (0.43, 0.25, 0.58)),
    ("white", (0.93, 0.93, 0.90)),
    ("brown", (0.42, 0.28, 0.18)),
    ("turquoise", (0.15, 0.60, 0.60)),
)
LIGHTS = (("left", -0.6), ("right", 0.6))


def write_examples(folder: Path) -> int:
    """Write the photographs (PNG) and captions (.txt) into `folder`; returns how many there are."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    down, across = np.mgrid[0:SIDE, 0:SIDE] / (SIDE - 1)
    for index, (name, color) in enumerate(TABLES):
        side, light_x = LIGHTS[index % 2]
        radius, middle_x, middle_y = 0.18 + 0.015 * index, 0.35 + 0.04 * index, 0.60 - 0.02 * index
        x, y = (across - middle_x) / radius, (down - middle_y) / radius
        light = np.array([light_x, -0.6, 0.55]) / np.linalg.norm([light_x, -0.6, 0.55])
        # The table is brighter towards the camera; the wall behind it is darker. The ball's shadow is an ellipse.
        picture = np.array(color) * np.where(down < 0.4, 0.55 + 0.3 * down, 0.45 + 0.55 * down)[..., None]
        shadow = ((x + 2.2 * light_x * 0.5) / 1.3) ** 2 + ((y - 0.95) / 0.35) ** 2
        picture = picture * (1 - 0.6 * np.exp(-(shadow**2)))[..., None]
        inside = x**2 + y**2 < 1
        depth = np.sqrt(np.clip(1 - x**2 - y**2, 0, 1))
        lit = np.clip(x * light[0] + y * light[1] + depth * light[2], 0, 1)
        shine = np.clip(2 * lit * depth - light[2], 0, 1) ** 40  # the reflection towards the camera
        ball = np.array([0.85, 0.08, 0.06]) * (0.18 + 0.82 * lit)[..., None] + 0.8 * shine[..., None]
        picture = np.where(inside[..., None], ball, picture)
        stem = f"red-ball-{index + 1}"
        Image.fromarray((np.clip(picture, 0, 1) * 255).astype("uint8")).save(folder / f"{stem}.png")
        caption = f"{TRIGGER}, a shiny red ball on a {name} table, light from the {side}"
        (folder / f"{stem}.txt").write_text(caption + "\n", encoding="utf-8")
    return len(TABLES)
