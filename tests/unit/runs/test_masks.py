"""Crop, mask and weight of an image: in the data set that a run trains on, and in what a trainer reads of it."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from draft_helpers import photo
from PIL import Image
from runs_helpers import png_header

import runs
from runs import dataset, masks, pictures
from runs.dataset import Source


def gradient(path: Path, size=(96, 64), **save) -> Path:
    """A picture in which no two pixels are equal: red tells the column, green the row."""
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width)[None, :], np.arange(height)[:, None]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **save)
    return path


def left_half(path: Path, size=(96, 64)) -> Path:
    """A mask that ignores the right half."""
    mask = Image.new("L", size, 255)
    mask.paste(0, (size[0] // 2, 0, *size))
    mask.save(path)
    return path


def written(tmp_path: Path, *sources: Source, **more) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    dataset.ingest(list(sources), folder, **more)
    return folder


def test_a_mask_is_the_alpha_channel_where_there_is_one_else_the_brightness():
    cut_out = Image.new("RGBA", (8, 8), (200, 10, 10, 255))
    cut_out.paste((200, 10, 10, 0), (0, 0, 4, 8))
    assert np.asarray(masks.read(masks.png(cut_out), "m.png", (80, 80)))[0].tolist() == [0] * 4 + [255] * 4
    plain = Image.new("RGBA", (8, 8), "white")
    plain.paste("black", (0, 0, 4, 8))
    for mode in ("RGBA", "RGB", "L", "1", "P"):
        mask = masks.read(masks.png(plain.convert(mode)), "m.png", (80, 80))
        assert mask.mode == "L" and np.asarray(mask)[0].tolist() == [0] * 4 + [255] * 4, mode
    large = masks.read(masks.png(Image.new("L", (4000, 3000), 255)), "m.png", (400, 300))
    assert large.size == (1024, 768) and len(masks.png(large)) < 10_000, "stored small"


def test_hostile_masks_are_refused_with_a_reason(tmp_path):
    good = masks.png(Image.new("L", (64, 64), 128))
    for content, expected in (
        (b"", "Not a readable image. Export it as PNG"),
        *((good[:at] + b"\xff" * (len(good) - at), "damaged") for at in range(41, 60)),
        (png_header(60_000, 60_000), "too large"),
        (bytes(masks.MAX_BYTES + 1), "too large for a mask"),
        (masks.png(Image.new("L", (64, 32))), "same shape"),
    ):
        with pytest.raises(runs.RunError, match=expected):
            masks.read(content, "m.png", (640, 640))


def test_a_masked_image_keeps_its_colours_below_the_mask_and_is_split_into_image_and_mask(tmp_path):
    picture, mask = gradient(tmp_path / "a.jpg", quality=95), left_half(tmp_path / "m.png")
    data = written(tmp_path, Source(picture, "a.jpg", "a cat", mask=mask), Source(picture, "b.jpg", "c"))
    assert masks.has_mask(data / "a.png")
    assert not masks.has_mask(data / "b.jpg") and not masks.has_mask(data / "none.png")
    found = masks.split(data, data / "a.png", tmp_path / "out.png")
    with Image.open(data / "a.png") as image, Image.open(picture) as before, Image.open(tmp_path / "out.png") as out:
        assert image.mode == "RGBA" and out.mode == "RGB" and out.tobytes() == before.tobytes()
        assert np.array_equal(np.asarray(image)[..., :3], np.asarray(before))
        for alpha in (np.asarray(image)[..., 3], np.asarray(found)):
            assert (alpha[:, :46] == 255).all() and (alpha[:, 50:] == 0).all()
    assert masks.split(data, data / "b.jpg", tmp_path / "other.png") is None and not (tmp_path / "other.png").exists()


@pytest.mark.parametrize("turn", range(4))
def test_a_mask_turns_and_is_cropped_with_its_image(tmp_path, turn):
    picture, mask = gradient(tmp_path / "a.png"), left_half(tmp_path / "m.png", (48, 32))
    crop = pictures.turned_crop((0.25, 0, 1, 0.5), turn)
    data = written(tmp_path, Source(picture, "a.png", "c", turn=turn, crop=crop, mask=mask))
    with Image.open(data / "a.png") as image:
        upright = np.asarray(pictures.turned(image, -turn % 4))
    assert upright.shape == (32, 72, 4) and upright[0, 0, 0] == 24
    assert (upright[:, :20, 3] == 255).all() and (upright[:, 28:, 3] == 0).all()


def test_a_mask_that_is_gone_is_an_error_with_the_name_of_its_image(tmp_path):
    sources = [Source(gradient(tmp_path / "a.png"), "a.png", "c", mask=tmp_path / "gone.png")]
    with pytest.raises(runs.RunError, match=r"a\.png: the mask cannot be read .*; draw it again or clear it"):
        written(tmp_path, *sources)
    assert not list((tmp_path / "data").iterdir())


def test_images_with_a_weight_get_a_subset_with_more_repeats(tmp_path):
    given = [("", 1), ("", 3), ("10_cat", 1), ("10_cat", 2), ("dogs", 10), ("", 3), ("weight-3", 1), ("weight-3", 3)]
    shots = [photo(tmp_path / f"{n}.png", n) for n in range(len(given))]
    each = zip(shots, given, strict=True)
    sources = [Source(shot, shot.name, "c", folder, weight=weight) for shot, (folder, weight) in each]
    data = written(tmp_path, *sources)
    # folder in the data set: (its images, their weight, the folder that they came from)
    made = {
        "": (1, 1, ""), "weight-3": (2, 3, ""), "10_cat": (1, 1, "10_cat"), "20_weight-2-cat": (1, 2, "10_cat"),
        "weight-10-dogs": (1, 10, "dogs"), "folder-weight-3": (1, 1, "folder-weight-3"),
        "weight-3-folder-weight-3": (1, 3, "folder-weight-3"),
    }  # fmt: skip
    found = dataset.counts(data)
    assert found == {name: count for name, (count, _, _) in made.items()}
    assert found == Counter(dataset.folder_names((source.folder, source.weight) for source in sources))
    assert dataset.shown_per_epoch(found, 5) == 5 + 2 * 15 + 10 + 20 + 50 + 5 + 15
    assert {name: dataset.weight_of(name) for name in found} == {name: row[1:] for name, row in made.items()}
    assert dataset.repeats_of("20_weight-2-cat") == (20, "cat")


@pytest.mark.parametrize(("backend", "model"), [("sd-scripts", "flux-dev"), ("musubi", "z-image")])
def test_every_trainer_reads_masks_and_weights_as_it_can(tmp_path, monkeypatch, backend, model):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "home"))
    spec = runs.make({"name": "cat", "model": model, "backend": backend, "repeats": 7, "trigger": "tok"})
    data = runs.datasets_dir() / spec.slug
    data.mkdir(parents=True)
    picture, mask = gradient(tmp_path / "a.png"), left_half(tmp_path / "m.png")
    sources = [Source(picture, "a.png", "c", mask=mask), Source(picture, "b.png", "c", "10_cat", weight=3)]
    dataset.ingest(sources, data, with_masks=masks.supported(backend))
    found = runs.dataset_tables(spec)
    if backend == "musubi":
        rows = found["datasets"]
        assert "alpha_mask" not in str(found) and not any(map(masks.has_mask, dataset.images_in(data)))
    else:
        rows = found["datasets"][0]["subsets"]
        assert all(row["alpha_mask"] is True for row in rows)
        assert [row["class_tokens"] for row in rows] == ["tok", "tok"]
    assert [row["num_repeats"] for row in rows] == [7, 30]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_data_set_made_from_another_one_has_its_masks_and_the_colours_below_them(
    tmp_path, monkeypatch, first, second
):
    """first, second: whether the trainer of each uses masks."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    data, notes = runs.datasets_dir(), []
    for name in ("one", "two"):
        (data / name).mkdir(parents=True)
    picture, mask = gradient(tmp_path / "a.png"), left_half(tmp_path / "m.png")
    sources = [Source(picture, "a.png", "a cat", mask=mask, weight=2), Source(picture, "b.png", "a dog")]
    dataset.ingest(sources, data / "one", with_masks=first)
    dataset.ingest(dataset.gather(data / "one"), data / "two", notes.append, with_masks=second)
    assert runs.read_captions("two") == {"b.png": "a dog", "weight-2/a.png": "a cat"}
    masked = data / "two" / "weight-2" / "a.png"
    assert masks.has_mask(masked) is second and not masks.has_mask(data / "two" / "b.png")
    before, found = (masks.split(data / one, data / one / "weight-2/a.png", tmp_path / one) for one in ("one", "two"))
    assert np.array_equal(np.asarray(found), np.asarray(before))
    with Image.open(masked) as image, Image.open(picture) as given:
        assert image.convert("RGB").tobytes() == given.tobytes()
    assert notes == [] if second is first is False else notes == [f"a.png: mask {'added' if second else 'apart'}"]
