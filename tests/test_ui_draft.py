"""A draft: what is dropped and typed is kept, image by image, whatever else happens."""

import json
import shutil

import pytest
from PIL import Image
from runs_helpers import data, picture  # noqa: F401
from ui_helpers import photos, small_disk

import runs
from ui import draft, form, images, new_lora, run_page


@pytest.fixture
def mine(data) -> str:  # noqa: F811
    return draft.new_id()


def drop(draft_id: str, *paths) -> tuple[int, list[str]]:
    """Drop files as the page does: copies below the uploads folder."""
    room = draft.uploads_dir() / "sha"
    room.mkdir(parents=True, exist_ok=True)
    return draft.add(draft_id, [shutil.copy(p, room / p.name) and room / p.name for p in paths])


def text(folder, name: str, words: str):
    path = folder / name
    path.write_text(words, encoding="utf-8")
    return path


def captions(draft_id: str) -> dict[str, str]:
    return {item.file: item.caption for item in draft.items(draft_id)}


def test_photographs_come_in_with_size_and_thumb(mine):
    added, told = drop(mine, *photos("astronaut.png", "rocket.jpg"))
    assert (added, told) == (2, [])
    sizes = {item.file: (item.width, item.height) for item in draft.items(mine)}
    assert sizes == {"astronaut.png": (512, 512), "rocket.jpg": (640, 427)}
    for item in draft.items(mine):
        with Image.open(draft.thumb(mine, item)) as small:
            assert max(small.size) <= draft.THUMB_SIDE


def test_edits_stay_when_images_are_added_and_removed(mine):
    drop(mine, *photos("astronaut.png", "chelsea.png", "coffee.png"))
    draft.set_caption(mine, "astronaut.png", "a woman in orange")
    draft.set_caption(mine, "coffee.png", "a cup")
    draft.remove(mine, "chelsea.png")
    drop(mine, *photos("rocket.jpg"))
    assert captions(mine) == {"astronaut.png": "a woman in orange", "coffee.png": "a cup", "rocket.jpg": ""}
    assert not list((draft.images_dir(mine)).glob("chelsea*"))


def test_caption_files_find_their_image_before_and_after_it(mine, tmp_path):
    drop(mine, text(tmp_path, "chelsea.txt", "a cat\nlooks"))
    assert draft.waiting(mine) == ["chelsea.txt"]
    drop(mine, *photos("chelsea.png", "coffee.png"))
    drop(mine, text(tmp_path, "coffee.txt", "a cup"))
    assert captions(mine) == {"chelsea.png": "a cat looks", "coffee.png": "a cup"}
    assert draft.waiting(mine) == []


def test_a_caption_file_does_not_replace_what_was_typed(mine, tmp_path):
    drop(mine, *photos("coffee.png"))
    draft.set_caption(mine, "coffee.png", "mine")
    _, told = drop(mine, text(tmp_path, "coffee.txt", "theirs"))
    assert captions(mine) == {"coffee.png": "mine"} and "kept the caption you wrote" in told[0]
    draft.set_caption(mine, "coffee.png", "")
    drop(mine, text(tmp_path, "coffee.txt", "theirs"))
    assert captions(mine) == {"coffee.png": "theirs"}


def test_bad_files_are_told_by_name_and_the_good_ones_stay(mine, tmp_path):
    huge = tmp_path / "huge.png"
    Image.new("1", (30_000, 1_000)).save(huge)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    added, told = drop(mine, text(tmp_path, "fake.png", "no image"), huge, latin, *photos("coffee.png"))
    assert added == 1 and list(captions(mine)) == ["coffee.png"]
    said = "\n".join(told)
    assert "fake.png: not an image" in said
    assert "huge.png: 30000 × 1000 pixels is too large; scale it down" in said
    assert "latin.txt: the caption is not UTF-8" in said
    assert not [p for p in draft.uploads_dir().rglob("*") if p.is_file()]


def test_the_same_picture_twice_is_taken_once_and_names_never_collide(mine, tmp_path):
    drop(mine, *photos("coffee.png"))
    added, told = drop(mine, *photos("coffee.png"))
    assert added == 0 and told == ["coffee.png: already there (coffee.png)"]
    other = picture(tmp_path / "coffee.jpg")
    assert drop(mine, other)[0] == 1
    assert sorted(captions(mine)) == ["coffee-2.jpg", "coffee.png"]


def test_hostile_names_become_plain_ones(mine, tmp_path):
    path = picture(tmp_path / "a <img src=x onerror=alert(1)> '$(id)'.png")
    assert drop(mine, path)[0] == 1
    (file,) = captions(mine)
    assert file.isascii() and not set(file) & set("<>'$()= ")


def test_the_trigger_word_goes_in_front_once(mine):
    drop(mine, *photos("astronaut.png", "coffee.png", "rocket.jpg"))
    draft.set_caption(mine, "astronaut.png", "a woman")
    draft.set_caption(mine, "coffee.png", "mytoken, a cup")
    assert draft.insert_trigger(mine, " mytoken ") == 2
    assert draft.insert_trigger(mine, "mytoken") == 0
    assert list(captions(mine).values()) == ["mytoken, a woman", "mytoken, a cup", "mytoken"]
    with pytest.raises(runs.RunError, match="no trigger word yet"):
        draft.insert_trigger(mine, "  ")


def test_an_id_from_the_browser_cannot_leave_the_drafts(data):  # noqa: F811
    for bad in ("../../outputs", "", None, 7, "a" * 23, "A" * 24, "/etc", "0" * 24 + "\n"):
        assert not draft.is_id(bad)
        with pytest.raises(runs.RunError, match="reload"):
            draft.folder(bad)


def test_the_page_can_only_hand_in_its_own_uploads(mine, tmp_path):
    secret = picture(tmp_path / "secret.png")
    for path in (str(secret), str(draft.uploads_dir() / ".." / ".." / ".." / "secret.png"), "/etc/passwd"):
        answer = images.add_images({"draft": mine, "paths": [path]})
        assert "reload the page" in answer["error"]
    assert secret.exists() and draft.items(mine) == []


def test_calls_from_a_browser_gone_wrong_answer_in_words(mine):
    for call in (images.list_images, images.save_caption, images.remove_image, images.clear_images, images.add_images):
        for junk in (None, [], "x", {}, {"draft": 3}, {"draft": "../x", "file": "f", "text": "t"}):
            assert "reload" in call(junk)["error"]
    gone = images.save_caption({"draft": mine, "file": "gone.png", "text": "x"})
    assert gone == {"error": "gone.png: the image has been removed"}


def test_pages_of_cards(mine, tmp_path):
    for n in range(images.PAGE_SIZE + 3):
        drop(mine, picture(tmp_path / f"p{n:02}.png", size=(32 + n, 32)))
    first, second = images.listing(mine, 0), images.listing(mine, 1)
    assert (first["total"], first["pages"], len(first["items"])) == (images.PAGE_SIZE + 3, 2, images.PAGE_SIZE)
    assert [one["file"] for one in second["items"]] == ["p12.png", "p13.png", "p14.png"]
    assert images.listing(mine, 99)["page"] == 1 and images.listing(mine, -1)["page"] == 0


def test_two_drafts_are_strangers(mine):
    drop(mine, *photos("coffee.png"))
    assert draft.items(draft.new_id()) == []


def test_a_full_disk_is_told_and_keeps_the_captions(tmp_path, monkeypatch):
    with small_disk(tmp_path, "600k") as disk:
        monkeypatch.setenv("HANGPROOF_DATA", str(disk))
        mine = draft.new_id()
        drop(mine, *photos("coins.png"))
        draft.set_caption(mine, "coins.png", "coins")
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        answer = images.save_caption({"draft": mine, "file": "coins.png", "text": "old coins " * 900})
        assert "the disk is full" in answer["error"]
        assert "the disk is full" in images.explain_refusal({"names": ["rocket.jpg"], "bytes": 9e6})["error"]
        filler.unlink()
        assert captions(mine) == {"coins.png": "coins"}
        assert images.save_caption({"draft": mine, "file": "coins.png", "text": "old coins"}) == {}


def test_a_draft_that_is_damaged_says_so(mine):
    drop(mine, *photos("coffee.png"))
    (draft.folder(mine) / "draft.json").write_text("{")
    answer = images.list_images({"draft": mine})
    assert "draft.json cannot be read" in answer["error"]


# The form --------------------------------------------------------------------------------------------------------


def values(**given) -> dict:
    return {**form.defaults(), "name": "my lora", "trigger": "tok", "model": "tiny-flux", **given}


def test_the_form_as_it_opens_is_a_valid_run_but_for_its_name():
    with pytest.raises(runs.RunError, match="Name: the LoRA has none yet"):
        form.spec_of(form.defaults())
    spec = form.spec_of({**form.defaults(), "name": "x"})
    assert spec == runs.make({"name": "x"})


def test_fields_become_the_spec():
    spec = form.spec_of(
        values(
            prompts="a cat\n\n a dog ",
            max_train_steps="12",
            learning_rate="1e-4",
            flags="weighting_scheme=none",
            rank=8,
        )
    )
    assert spec.prompts == ["a cat", " a dog "] and spec.max_train_steps == 12 and spec.learning_rate == 1e-4
    assert spec.rank == 8 and spec.extra == {"weighting_scheme": "none"}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"name": "///"}, "Name: the name '///' has no letter or digit"),
        ({"name": "💥 🔥"}, "Name: the name '💥 🔥' has no letter or digit"),
        ({"name": None}, "Name: the LoRA has none yet"),
        ({"epochs": None}, "Epochs: is empty; the default is 16"),
        ({"epochs": 0}, "Epochs: Input should be greater than or equal to 1"),
        ({"learning_rate": "fast"}, "Learning rate: Input should be a valid number"),
        ({"resolution": 500}, "Resolution: Input should be a multiple of 32"),
        ({"flags": "rank 5"}, "Further flags: 'rank 5'"),
        ({"flags": "no_such_flag=1"}, None),
    ],
)
def test_a_wrong_value_is_told_by_the_label_that_the_page_shows(given, said):
    if said is None:
        spec = form.spec_of(values(**given))
        assert spec.extra  # unknown flags are refused when the run is made
    else:
        with pytest.raises(runs.RunError) as caught:
            form.spec_of(values(**given))
        assert said in str(caught.value)


def test_a_start_tells_everything_that_is_missing_at_once_and_makes_nothing(data, mine):  # noqa: F811
    with pytest.raises(runs.RunError) as caught:
        form.create(values(name="", epochs=None), mine)
    said = str(caught.value)
    assert "Name:" in said and "Epochs: is empty" in said and "Images: there are none yet" in said
    assert runs.list_runs() == []


def test_a_missing_model_file_is_told_before_anything_is_made(data, mine):  # noqa: F811
    drop(mine, *photos("coffee.png"))
    with pytest.raises(runs.RunError) as caught:
        form.create(values(model="flux-dev", backend="sd-scripts"), mine)
    assert "missing in" in str(caught.value) and "flux1-dev.safetensors" in str(caught.value)
    assert runs.list_runs() == [] and captions(mine) == {"coffee.png": ""}


def test_one_image_is_taken_with_a_word_about_it(data, mine):  # noqa: F811
    drop(mine, *photos("coffee.png"))
    assert "One image only" in form.plan(values(), 1)
    folder, told = form.create(values(), mine)
    assert any("one image only" in line for line in told)
    assert runs.read_captions(folder.name) == {"coffee.png": "tok"}


def test_a_name_that_exists_is_refused_and_the_draft_stays(data, mine):  # noqa: F811
    drop(mine, *photos("coffee.png"))
    draft.set_caption(mine, "coffee.png", "a cup")
    folder, _ = form.create(values(), mine)
    before = (folder / "run.toml").read_bytes()
    with pytest.raises(runs.RunError, match="Name: a run called 'my lora' exists; choose another name"):
        form.create(values(epochs=2), mine)
    assert (folder / "run.toml").read_bytes() == before
    assert captions(mine) == {"coffee.png": "a cup"}
    assert runs.read_captions("my-lora") == {"coffee.png": "a cup"}


def test_the_script_shown_is_the_script_written(data, mine):  # noqa: F811
    drop(mine, *photos("coffee.png", "rocket.jpg"))
    shown = form.script_of(values(), 2)
    folder, _ = form.create(values(), mine)
    assert (folder / "train.sh").read_text(encoding="utf-8") == shown


def test_a_stored_form_comes_back_and_a_model_that_is_gone_does_not(mine):
    stored = values(trigger="$(rm -rf /)", model="a-model-i-removed", epochs=None, unknown=1)
    draft.save_form(mine, stored)
    back = form.restored(draft.form(mine))
    assert back["trigger"] == "$(rm -rf /)" and back["epochs"] is None and back["model"] == form.defaults()["model"]
    assert set(back) == set(form.KEYS)


def test_a_model_brings_its_own_values_and_takes_them_away():
    tiny, big = form.model_values("tiny-flux", "diffusers"), form.model_values("flux-dev", "diffusers")
    assert (tiny["resolution"], tiny["mixed_precision"]) == (64, "no")
    assert (big["resolution"], big["mixed_precision"]) == (512, "bf16")
    assert form.model_values("flux-dev2pro", "diffusers")["backend"] == "sd-scripts"


def test_the_plan_counts_the_steps():
    assert "<strong>320 steps</strong>" in form.plan(values(), 2)
    assert "Add images" in form.plan(values(), 0)
    assert "&lt;" in form.plan(values(name="<b>", epochs="<i>"), 2)


def test_nothing_typed_is_lost_by_storing_it(mine):
    strange = values(trigger='"\\\n\x00é💥', prompts="</textarea><script>", name="   ")
    draft.save_form(mine, strange)
    assert draft.form(mine) == json.loads(json.dumps(strange))


# A run used once more ------------------------------------------------------------------------------------------------


def test_a_runs_settings_images_and_captions_become_a_draft_again(data, mine, tmp_path):  # noqa: F811
    drop(mine, *photos("coffee.png", "rocket.jpg"), picture(tmp_path / "turned.jpg", exif=b""))
    draft.set_caption(mine, "coffee.png", "a cup, é💥")
    typed = values(prompts="a\nb", rank=8, learning_rate="0.000123456789", flags="weighting_scheme=none", epochs=3)
    folder, _ = form.create(typed, mine)
    before = {p: p.read_bytes() for p in (data / "datasets" / "my-lora").iterdir()}
    other = draft.new_id()
    assert draft.take_over(other, "my-lora") == [] and draft.only_here(other) == 0
    assert captions(other) == {"coffee.png": "a cup, é💥", "rocket.jpg": "tok", "turned.jpg": "tok"}
    assert {p: p.read_bytes() for p in (data / "datasets" / "my-lora").iterdir()} == before
    back = form.values_of_spec(runs.load(folder), 3)
    assert {**back, "flags": back["flags"].strip()} == {**typed, "alpha": "1.0"}
    assert form.free_name("my lora") == "my lora 2"
    with pytest.raises(runs.RunError, match="a run called 'my lora' exists"):
        form.create(back, other)
    again, _ = form.create({**back, "name": "my lora 2"}, other)
    assert runs.load(again).changed(name="my lora") == runs.load(folder)
    assert form.free_name("my lora") == "my lora 3"


@pytest.mark.parametrize(
    "given",
    [
        {"gpus": 2, "keep_tokens": 3, "trackers": "all", "save_dir": "/tmp/some where"},
        {
            "extra": {
                "optimizer_args": ["a=1", "b c"],
                "max_grad_norm": 0.5,
                "highvram": False,
                "lr_scheduler": "cosine",
            }
        },
        {"save_every_n_steps": 0, "max_train_steps": 77, "sample_every_n_steps": 5, "mixed_precision": "fp16"},
        {"learning_rate": 1.23456789012e-05, "alpha": 0.1 + 0.2, "prompts": ["# one", "two --w 64"], "trigger": " x "},
        {"model": "tiny-flux", "resolution": 96},
    ],
)
def test_a_spec_comes_back_from_the_form_as_it_was(given):
    spec = runs.make({"name": "x", "model": "flux-dev", **given})
    assert form.spec_of(form.values_of_spec(spec, 4)) == spec


def test_a_save_interval_that_followed_from_the_images_does_so_again(data, mine):  # noqa: F811
    drop(mine, *photos("coffee.png", "rocket.jpg"))
    spec = runs.load(form.create(values(), mine)[0])
    assert spec.save_every_n_steps == 32 and form.values_of_spec(spec, 2)["save_every_n_steps"] == ""
    assert form.values_of_spec(spec.changed(save_every_n_steps=31), 2)["save_every_n_steps"] == "31"


def test_images_and_captions_that_are_in_no_run_are_known(data, mine):  # noqa: F811
    assert draft.only_here(mine) == 0
    drop(mine, *photos("coffee.png", "rocket.jpg"))
    assert draft.only_here(mine) == 2
    form.create(values(), mine)
    assert draft.only_here(mine) == 0
    draft.set_caption(mine, "coffee.png", "another")
    assert draft.only_here(mine) == 2
    draft.set_caption(mine, "coffee.png", "")
    draft.remove(mine, "rocket.jpg")
    assert draft.only_here(mine) == 1


def test_a_draft_is_not_replaced_without_asking_nor_by_a_run_without_images(data, mine):  # noqa: F811
    drop(mine, *photos("coffee.png"))
    folder, _ = form.create(values(), mine)
    other = draft.new_id()
    drop(other, *photos("rocket.jpg"))
    draft.set_caption(other, "rocket.jpg", "mine alone")
    (asked,) = run_page.use_again(folder.name, "", other)
    assert "1 image with its caption under New LoRA is in no run yet" in asked[0] and asked[1] == folder.name
    assert captions(other) == {"rocket.jpg": "mine alone"}
    shutil.move(data / "datasets" / folder.name, data / "away")
    *_, told = run_page.use_again(folder.name, folder.name, other)
    assert "no data set" in told[0] and captions(other) == {"rocket.jpg": "mine alone"}
    shutil.move(data / "away", data / "datasets" / folder.name)
    *_, done = run_page.use_again(folder.name, folder.name, other)
    assert captions(other) == {"coffee.png": "tok"} and done[2]["total"] == 1 and done[4] == "my lora 2"
    assert draft.form(other)["name"] == "my lora 2"
    *_, again = run_page.use_again(folder.name, "", other)  # nothing of its own in it: not asked
    assert again[2]["total"] == 1


# Faults beside the fields --------------------------------------------------------------------------------------------


def test_every_fault_is_told_at_once_and_by_its_field():
    given = values(epochs=0, rank=None, learning_rate="fast", flags="rank 5\noutput_dir=/", resolution=500)
    found = form.faults(given)
    assert set(found) == {"epochs", "rank", "learning_rate", "flags", "resolution"}
    assert found["rank"] == "is empty; the default is 4" and "KEY=VALUE" in found["flags"]
    assert "output_dir follows from the run's folder" in form.faults(values(flags="output_dir=/"))["flags"]
    assert form.faults(values(name="")) == {} and "name" in form.faults(values(name="///"))
    assert set(form.by_field("Name: x\nImages: none\nno accelerate")) == {"name", "images"}


def test_a_table_of_models_broken_while_the_page_is_open_costs_nothing(data, mine):  # noqa: F811
    drop(mine, *photos("coffee.png"))
    typed = values(trigger="kept")
    (data / "models.toml").write_text("[models.")
    plan, *_ = new_lora.refresh(mine, *(typed[key] for key in form.KEYS))
    assert "models.toml" in plan and "fix the line" in plan
    opened = new_lora.load(mine)
    assert opened[0] == mine and "fix the line" in opened[2] and opened[3 + form.KEYS.index("trigger")] == "kept"
    *_, (problem, _, name, _) = new_lora.start(mine, *(typed[key] for key in form.KEYS))
    assert "fix the line" in problem and name == "" and runs.list_runs() == []
    (data / "models.toml").unlink()
    assert draft.form(mine)["trigger"] == "kept" and captions(mine) == {"coffee.png": ""}


def test_the_memory_that_a_run_needs_is_told_and_too_much_of_it_warned_of():
    assert "about 10.8 GB of GPU memory at 512 pixels" in form.model_note(values(model="flux-dev", tier="12G"))
    much = form.model_note(values(model="flux-dev", tier="12G", resolution=2048))
    assert "That is more than 12 GB" in much and "more than 12 GB" not in form.model_note(values(tier="12G"))
