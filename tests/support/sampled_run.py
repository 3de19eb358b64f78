"""A run with sample images."""

import shutil

import pytest
from ui_helpers import photos, write_run

HOSTILE = "a dog </p><img src=x onerror=alert(1)>"


@pytest.fixture
def sampled(data):
    """A run with two prompts at three steps, and an image of another name."""
    made = write_run(data, "my cat")
    (made / "sample").mkdir()
    (made / "sample_prompts.txt").write_text(f"a cat\n{HOSTILE}\n")
    for step in (8, 16, 24):
        for prompt in (0, 1):
            shutil.copy(photos("coffee.png")[0], made / "sample" / f"cat_{step:06}_{prompt:02}_20260101120000_42.png")
    shutil.copy(photos("coffee.png")[0], made / "sample" / "mine.png")
    return made
