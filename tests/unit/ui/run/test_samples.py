"""The pictures of a run: in order, with any text, and only those that the page sends."""

import shutil

import pytest
from ui_helpers import photos, write_run

from ui.run import samples, view

HOSTILE = "a dog </p><img src=x onerror=alert(1)>"


@pytest.fixture
def folder(data):
    """A run with two prompts at three steps, and an image of another name."""
    made = write_run(data, "my cat")
    (made / "sample").mkdir()
    (made / "sample_prompts.txt").write_text(f"a cat\n{HOSTILE}\n")
    for step in (8, 16, 24):
        for prompt in (0, 1):
            shutil.copy(photos("coffee.png")[0], made / "sample" / f"cat_{step:06}_{prompt:02}_20260101120000_42.png")
    shutil.copy(photos("coffee.png")[0], made / "sample" / "mine.png")
    return made


def test_pictures_are_in_the_order_of_their_steps_with_their_prompts(folder):
    found = view.evolution(folder)
    assert samples.prompts(found) == {0: "a cat", 1: HOSTILE}
    captions = [caption for _, caption in samples.pictures(found)]
    assert captions[:3] == ["Step 8 · a cat", f"Step 8 · {HOSTILE}", "Step 16 · a cat"] and captions[-1] == "mine.png"
    assert [caption for _, caption in samples.pictures(found, 0)] == [f"Step {n} · a cat" for n in (8, 16, 24)]


def test_pictures_outside_the_folder_and_other_files_are_left_out(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "secret.png"
    shutil.copy(photos("coffee.png")[0], outside)
    (folder / "sample" / "mine.png").unlink()
    (folder / "sample" / "mine.png").symlink_to(outside)
    (folder / "sample" / "cat_000008_00_20260101120000_42.png").unlink()
    shown = samples.pictures(view.evolution(folder))
    assert shown[0][1] == f"Step 8 · {HOSTILE}" and len(shown) == 5
    assert not any("secret" in path or "mine" in path for path, _ in shown)


def test_texts_stay_texts_and_a_run_without_samples_says_how_to_get_them(folder, data):
    empty = write_run(data, "empty")
    assert "“Sample prompts”" in samples.summary(view.evolution(empty), empty)
    assert samples._next(empty)[0] is None and "fewer than two" in samples._next(empty)[1]
    assert samples.summary(view.evolution(folder), folder) == ""
    (folder / "metrics.jsonl").write_text('{"kind": "validation", "step": 16, "val_loss": 0.25}\n')
    assert "0.25 at step 16" in samples.summary(view.evolution(folder), folder)
