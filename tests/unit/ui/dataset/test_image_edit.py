"""Rotation, crop, mask and weight of an image, stored at once, and what a run gets of them."""

import base64
import io
import re

import numpy as np
import pytest
from draft_helpers import drop, item, item_of, mask_of, photo, run_of, top_ignored
from PIL import Image

import runs
from runs import dataset
from runs.masks import png
from ui.dataset import draft, draft_images, draft_store, image_edit, images
from ui.new import form


def masked(draft_id: str, image_id: str, content: bytes, **more) -> None:
    image_edit.mask(draft_id, image_id, base64.b64encode(content).decode(), **more)


def shown_mask(draft_id: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(image_edit.shown_mask(draft_id, item_of(draft_id, "a.png")))))


def test_edits_are_undone_and_never_change_the_dropped_file(mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", size=(400, 300)))
    item = item_of(mine, "a.png")
    before = draft.original(mine, item.id).read_bytes()
    image_edit.crop(mine, item.id, [0.25, 0, 0.75, 1])
    assert draft.thumb(mine, item_of(mine, "a.png")).is_file()
    image_edit.weigh(mine, [item.id], 4)
    masked(mine, item.id, top_ignored(400, 300))
    image_edit.rotate(mine, item.id, 1)
    after = item_of(mine, "a.png")
    assert (after.turn, after.crop, after.weight) == (1, (0, 0.25, 1, 0.75), 4)
    assert (after.width, after.height) == (300, 400) and after.trained_size == (300, 200)
    assert mask_of(mine, after).shape == (300, 400) and not mask_of(mine, after)[:140].any()  # as the file is
    thumb = draft.thumb(mine, after)
    with Image.open(thumb) as small:
        assert small.width > small.height
    assert len(list(thumb.parent.glob(f"{item.id}-480-*.jpg"))) == 1  # that of the edits before is gone
    undone = [draft.undo(mine) for _ in range(4)]
    assert undone == [f"Undone: {what} of a.png." for what in ("rotation", "mask", "weight", "crop")]
    assert item_of(mine, "a.png") == item and draft.original(mine, item.id).read_bytes() == before


def test_a_warning_counts_the_pixels_that_are_trained(mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", size=(600, 600)))
    for crop, small in ((None, False), ([0, 0, 0.3, 1], True), (None, False)):
        image_edit.crop(mine, item_of(mine, "a.png").id, crop)
        assert ("small" in item_of(mine, "a.png").warnings) is small


@pytest.mark.parametrize("turn", range(4))
def test_a_mask_is_drawn_on_the_rotated_image(mine, tmp_path, turn):
    drop(mine, photo(tmp_path / "a.png", size=(80, 60)))
    item = item_of(mine, "a.png")
    if turn:
        image_edit.rotate(mine, item.id, turn)
    shape = (80, 60) if turn % 2 == 0 else (60, 80)
    masked(mine, item.id, top_ignored(*shape))
    shown = shown_mask(mine)
    assert shown.size == shape and not np.asarray(shown)[: shape[1] // 2 - 1].any() and np.asarray(shown)[-1].all()
    image_edit.rotate(mine, item.id, 1)
    assert item_of(mine, "a.png").turn == (turn + 1) % 4
    masked(mine, item.id, top_ignored(*shape), turn=turn)  # drawn before the rotation arrived
    image_edit.rotate(mine, item.id, -1)
    assert shown_mask(mine).tobytes() == shown.tobytes()


def test_a_white_mask_is_no_mask_and_unused_masks_are_deleted(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(draft_store, "HISTORY_STEPS", 2)
    drop(mine, photo(tmp_path / "a.png", size=(64, 64)))
    for level in (255, 1, 2, 3, 4, 5):
        masked(mine, item_of(mine, "a.png").id, png(Image.new("L", (64, 64), level)))
        assert (item_of(mine, "a.png").mask is None) == (level == 255)
    draft_store.close(draft.folder(mine) / draft_store.NAME)
    assert draft.items(mine) and len(list(draft.masks_dir(mine).iterdir())) == 3, "those of two undo steps"


def test_a_run_and_a_copy_of_it_have_the_edits(data, mine, tmp_path):
    for n in range(4):
        drop(mine, (photo(tmp_path / f"{n}.png", n, size=(128, 128)), f"10_cat/{n}.png" if n == 3 else f"{n}.png"))
    first, second, third, fourth = (item.id for item in draft.items(mine))
    draft.set_caption(mine, first, "a caption")
    image_edit.crop(mine, second, [0, 0, 0.5, 1])
    masked(mine, third, top_ignored(128, 128))
    image_edit.weigh(mine, [first, fourth], 3)
    masked(mine, fourth, top_ignored(128, 128))
    expected = draft.counts(mine)
    run_of(mine, repeats=5)
    folder = data / "datasets/my-lora"
    assert dataset.counts(folder) == expected == {"weight-3": 1, "": 2, "30_weight-3-cat": 1}
    assert runs.planned_steps(runs.make({"name": "x", "model": "tiny-flux", "repeats": 5, "epochs": 1}), expected) == 55
    with Image.open(folder / "1.png") as cropped:
        assert cropped.size == (64, 128)
    other = draft.new_id()
    assert draft.copy_dataset(other, "my-lora") == []
    found = {f"{item.folder}/{item.file}": item for item in draft.items(other)}
    assert [found[name].weight for name in ("/0.png", "/1.png", "/2.png", "10_cat/3.png")] == [3, 1, 1, 3]
    assert {name for name, item in found.items() if item.mask} == {"/2.png", "10_cat/3.png"}
    assert not mask_of(other, found["/2.png"])[:60].any() and found["/0.png"].caption == "a caption"
    with Image.open(draft.original(other, found["/2.png"].id)) as image, Image.open(tmp_path / "2.png") as before:
        assert image.mode == "RGB" and image.tobytes() == before.tobytes()
    assert draft.counts(other) == expected


def test_a_run_of_a_trainer_without_masks_says_so_and_its_copy_has_them(data, mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", size=(128, 128)), photo(tmp_path / "b.png", 1, size=(128, 128)))
    masked(mine, item_of(mine, "a.png").id, top_ignored(128, 128))
    values = {**form.defaults(), "name": "n", "model": "z-image", "backend": "musubi"}
    items, counts = draft.items(mine), draft.counts(mine)
    said = " ".join(fault.message for fault in form.review(values, counts, items=items).warnings)
    assert "kohya's musubi-tuner cannot use masks: 1 of the images has one and is trained as a whole." in said
    values = {**values, "model": "tiny-flux", "backend": "diffusers"}
    masked(mine, item_of(mine, "b.png").id, png(Image.new("L", (128, 128), 0)))
    said = " ".join(fault.message for fault in form.review(values, counts, items=draft.items(mine)).warnings)
    assert "The mask ignores all of b.png: erase a part of it, or remove the image" in said
    draft.undo(mine)
    assert not any("mask" in fault.message for fault in form.review(values, counts, items=items).warnings)
    black = [item(f"{n}", 9, 9, mask=draft_images.IGNORES_ALL, turn=int(n == 1)) for n in range(5)]
    notes = image_edit.start_notes(black, "diffusers", True)
    assert notes[0].startswith("1 image is cropped or rotated, but") and "0.png, 1.png, 2.png and 2 more: " in notes[1]
    assert "cannot use masks" in image_edit.mask_note("musubi")[0]
    assert [image_edit.mask_note(name)[1] for name in ("musubi", "sd-scripts", 7)] == [False, True, True]
    run_of(mine, model="z-image", backend="musubi")
    other = draft.new_id()
    draft.copy_dataset(other, "my-lora")
    assert [bool(item.mask) for item in draft.items(other)] == [True, False]


def test_a_mask_that_is_no_mask_is_refused_with_its_name(mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", size=(64, 48)))
    item = draft.items(mine)[0]
    for content, expected in (
        (b"<script>alert(1)</script>", "Not a readable image. Export it as PNG"),
        (png(Image.new("L", (48, 64))), "same shape"),
        (png(Image.new("L", (64, 48)))[:-30], "damaged"),
    ):
        sent = {"id": item.id, "action": "mask", "png": base64.b64encode(content).decode(), "name": "<b>m.png"}
        assert re.match(f"<b>m.png: .*{expected}", images.image_action({"draft": mine, **sent})["error"])
    assert draft.items(mine)[0] == item
