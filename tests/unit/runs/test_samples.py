"""Sample images by default: about every tenth of the run, where a LoRA is saved, and never a reason that a run cannot start."""

import pytest
from PIL import Image
from runs_helpers import pictures, spec

import runs
from runs.examples import SIDE, TRIGGER, write_examples


def open_spec(**fields):
    return spec(**{"sample_every_n_steps": None, **fields})


def test_samples_come_every_tenth_of_the_run_with_the_trigger_word(tmp_path, data):
    folder = runs.create(open_spec(trigger="tok", repeats=10, epochs=20), pictures(tmp_path / "in"))
    made = runs.load(folder)
    count = len(runs.images_in(data / "datasets" / made.slug))
    assert made.sample_every_n_steps == count * 10 * 20 // 10
    assert (folder / "sample_prompts.txt").read_text().startswith("tok --w")
    assert f"--sample_every_n_steps {made.sample_every_n_steps}" in (folder / "train.sh").read_text()


def test_without_a_trigger_the_first_caption_is_drawn_without_its_options():
    captions = ["", " ", "a cat --w 9999\n--n x", "a dog"]
    made = runs.with_intervals(open_spec(trigger="", max_train_steps=100), {"": 5}, captions)
    assert made.sample_every_n_steps == 10 and made.prompts == ["a cat  w 9999  n x"]
    assert runs.sample_prompts(made).startswith("a cat w 9999 n x --w 512 --h 512")


def test_with_nothing_to_draw_samples_are_off_and_the_run_is_created(tmp_path, data):
    folder = runs.create(open_spec(trigger=""), pictures(tmp_path / "in"))
    assert runs.load(folder).sample_every_n_steps == 0
    assert "sample" not in (folder / "train.sh").read_text().replace("sample_prompts.txt", "")


def test_an_interval_that_was_set_stays_and_a_short_run_draws_after_each_step_at_most():
    for fields, interval in (
        ({"sample_every_n_steps": 7}, 7),
        ({"sample_every_n_steps": 0, "trigger": "tok"}, 0),
        ({"trigger": "tok", "max_train_steps": 3}, 1),
    ):
        assert runs.with_intervals(open_spec(**fields), {"": 5}).sample_every_n_steps == interval


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


@pytest.mark.parametrize(
    ("images", "repeats", "epochs", "every"), [(12, 10, 17, 4), (20, 10, 10, 4), (4, 24, 20, 4), (10, 10, 20, 0)]
)
def test_each_lora_that_stays_has_samples_of_its_step(images, repeats, epochs, every):
    made = open_spec(repeats=repeats, epochs=epochs, save_every_n_epochs=every, trigger="tok")
    interval, epoch = runs.with_intervals(made, {"": images}).sample_every_n_steps, images * repeats
    assert epoch * every % interval == 0 and epoch * epochs % interval == 0
    assert 5 <= epoch * epochs / interval <= 20


def test_a_run_without_an_end_in_sight_has_an_interval_too():
    made = open_spec(repeats=1, epochs=10**9, save_every_n_epochs=1, trigger="tok")
    assert runs.with_intervals(made, {"": 2}).sample_every_n_steps == 200_000_000
