"""A draft keeps dropped images and typed captions, whatever else happens."""

import errno
import os
import shutil
import tempfile
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from configure_helpers import values
from draft_helpers import captions, create_run, drop, item_of, note, photo, set_caption, upload
from runs_helpers import picture
from ui_helpers import photos

import runs
from runs.files import RunError
from ui.dataset import draft, draft_store, image_edit, images, imports
from ui.new import form, new_lora
from ui.run import run_page


def test_a_caption_file_does_not_replace_what_was_typed(mine, tmp_path):
    drop(mine, *photos("coffee.png"))
    set_caption(mine, "coffee.png", "mine")
    _, messages = drop(mine, note(tmp_path / "coffee.txt", "theirs"))
    assert captions(mine) == {"coffee.png": "mine"} and "your typed caption was kept" in messages[0]
    for typed in ("", "theirs"):
        set_caption(mine, "coffee.png", typed)
        assert drop(mine, note(tmp_path / "coffee.txt", "theirs")) == (0, [])
        assert captions(mine) == {"coffee.png": "theirs"}


def test_the_trigger_word_is_added_once(mine):
    drop(mine, *photos("astronaut.png", "coffee.png", "rocket.jpg"))
    set_caption(mine, "astronaut.png", "a woman")
    set_caption(mine, "coffee.png", "mytoken, a cup")
    draft.save_fields(mine, {"trigger": " mytoken "})
    for _ in range(2):
        assert images.image_action({"action": "insert_trigger", "draft": mine})["list"]["total"] == 3
    assert draft.history(mine)[0] == "trigger word in 2 captions"
    assert list(captions(mine).values()) == ["mytoken, a woman", "mytoken, a cup", "mytoken"]
    with pytest.raises(RunError, match="This image was removed"):
        draft.insert_trigger(mine, "0" * 24)
    set_caption(mine, "coffee.png", "")
    assert "no_caption" in item_of(mine, "coffee.png").warnings
    draft.insert_trigger(mine, item_of(mine, "coffee.png").id)
    assert "no_caption" not in item_of(mine, "coffee.png").warnings and captions(mine)["coffee.png"] == "mytoken"
    draft.save_fields(mine, {"trigger": "tok, photo"})
    for _ in range(2):
        draft.insert_trigger(mine, item_of(mine, "coffee.png").id)
    assert captions(mine)["coffee.png"] == "tok, photo, mytoken"
    draft.save_fields(mine, {"trigger": "  "})
    assert "Type a trigger word" in images.image_action({"action": "insert_trigger", "draft": mine})["error"]


def test_an_id_from_the_browser_cannot_leave_the_drafts(data):
    for bad in ("../../outputs", "", None, 7, "a" * 23, "A" * 24, "/etc", "0" * 24 + "\n"):
        assert not draft.is_id(bad)
        with pytest.raises(runs.RunError, match="reload"):
            draft.folder(bad)


def test_the_page_can_only_add_its_own_uploads(mine, tmp_path):
    secret = picture(tmp_path / "secret.png")
    for path in (str(secret), str(draft.uploads_dir() / ".." / ".." / ".." / "secret.png"), "/etc/passwd"):
        sent = {"draft": mine, "uploads": [{"path": path, "name": "x.png"}], "drop": ""}
        answer = images.image_action({"action": "add_images", **sent})
        assert "Only files that were uploaded here can be added" in answer["error"]
    assert secret.exists() and draft.items(mine) == []


def test_an_upload_that_fails_on_a_full_disk_says_so(mine, monkeypatch):
    failed = {"action": "explain_failed_upload", "draft": mine, "names": ["rocket.jpg"], "bytes": 9e6}
    assert "the upload failed" in images.image_action(failed)["error"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=60_000_000))
    assert "rocket.jpg: the disk is full (60 MB free" in images.image_action(failed)["error"]
    for number, why in ((errno.EDQUOT, "your disk quota"), (errno.EROFS, "the file system is read-only")):
        monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=OSError(number, os.strerror(number))))
        assert f"cannot write to {draft.datasets_dir()}: {why}" in images.image_action(failed)["error"]


def test_a_damaged_draft_is_reported(mine):
    drop(mine, *photos("coffee.png"))
    draft_store._file(mine).sql("UPDATE content SET value = '{'")
    draft_store.close(draft.folder(mine) / draft_store.NAME)
    for damage in ("of a row", "of the file"):
        answer = images.image_action({"action": "list_images", "draft": mine})
        assert "draft.sqlite cannot be read" in answer["error"], damage
        assert f"Move {draft.folder(mine)} to another place, reload" in answer["error"], damage
        for path in draft.folder(mine).glob("draft.sqlite*"):
            path.unlink()
        (draft.folder(mine) / "draft.sqlite").write_text("{" * 5000)


def test_a_spec_survives_the_form_unchanged():
    for given in (
        {"gpus": 2, "keep_tokens": 3, "trackers": "all", "save_dir": "/tmp/some where"},
        {"extra": {"optimizer_args": ["a=1", "b c"], "max_grad_norm": 0.5, "highvram": False}},
        {"save_every_n_steps": 0, "max_train_steps": 77, "sample_every_n_steps": 5, "mixed_precision": "fp16"},
        {"learning_rate": 1.23456789012e-05, "alpha": 0.1 + 0.2, "prompts": ["# one", "two --w 64"], "trigger": " x "},
        {"model": "tiny-flux", "resolution": 96},
        {"model": "z-image", "backend": "musubi", "tier": "16G", "epochs": 7},
        {"price_per_hour": 1234.5678, "spend_limit": 1234567.0, "validation_split": 1 / 3, "caption_dropout": 1e-5},
    ):
        spec = runs.make({"name": "x", "model": "flux-dev", **given})
        assert form.parse(form.values_of_spec(spec, {"": 4}))[0] == spec
    one_prompt = spec.changed(prompts=["a cat\non a mat"])
    back = form.parse(form.values_of_spec(one_prompt, {"": 4}))[0]
    assert runs.sample_prompts(back) == runs.sample_prompts(one_prompt)


def test_intervals_computed_from_the_images_are_left_empty_in_a_copy(data, mine):
    cup, rocket = photos("coffee.png", "rocket.jpg")
    drop(mine, cup, (rocket, "3_cat/rocket.jpg"))
    folder, _ = create_run(mine, values())
    spec, other = runs.load(folder), draft.new_id()
    assert spec.save_every_n_steps == 20
    runs.save(folder, spec.changed(environment={"WANDB_MODE": "offline"}))
    *_, (*_, said, _) = run_page.copy_to_new_lora(folder.name, "", other)
    assert "Not copied: WANDB_MODE. Set them in the table" in str(said)
    assert [draft.form(other)[key] for key in ("save_every_n_steps", "sample_every_n_steps")] == ["", ""]
    kept = form.values_of_spec(spec.changed(save_every_n_steps=31), {"": 1, "3_cat": 1})
    assert kept["save_every_n_steps"] == "31"


def test_images_that_no_run_contains_are_counted(data, mine, monkeypatch):
    assert draft.images_not_in_a_run(mine) == 0
    drop(mine, *photos("coffee.png", "rocket.jpg"))
    assert draft.images_not_in_a_run(mine) == 2
    create_run(mine, values())
    assert draft.images_not_in_a_run(mine) == 0
    image_edit.weigh(mine, [item_of(mine, "coffee.png").id], 2)
    assert draft.images_not_in_a_run(mine) == 2
    draft.undo(mine)
    assert draft.images_not_in_a_run(mine) == 0
    set_caption(mine, "coffee.png", "another")
    assert draft.images_not_in_a_run(mine) == 2
    set_caption(mine, "coffee.png", "")
    draft.remove(mine, [item_of(mine, "rocket.jpg").id])
    assert draft.images_not_in_a_run(mine) == 1
    create = runs.create
    typed = lambda *given, **more: set_caption(mine, "coffee.png", "typed meanwhile") or create(*given, **more)  # noqa: E731
    monkeypatch.setattr("ui.new.run_starts.create_run", typed)
    create_run(mine, values(name="another"))
    assert draft.images_not_in_a_run(mine) == 1


def test_a_draft_is_replaced_only_after_confirmation_and_by_a_run_with_images(data, mine, monkeypatch):
    drop(mine, *photos("coffee.png"))
    folder, _ = create_run(mine, values())
    other = draft.new_id()
    drop(other, *photos("rocket.jpg"))
    set_caption(other, "rocket.jpg", "mine alone")
    (question,) = run_page.copy_to_new_lora(folder.name, "", other)
    assert "1 image under New LoRA would be lost" in question[0] and question[1] == folder.name
    assert captions(other) == {"rocket.jpg": "mine alone"}
    shutil.move(data / "datasets" / folder.name, data / "away")
    *_, failed = run_page.copy_to_new_lora(folder.name, folder.name, other)
    assert "data set" in failed[0] and captions(other) == {"rocket.jpg": "mine alone"}
    shutil.move(data / "away", data / "datasets" / folder.name)
    *_, done = run_page.copy_to_new_lora(folder.name, folder.name, other)
    assert captions(other) == {"coffee.png": "tok"} and done[2]["total"] == 1
    assert draft.form(other)["name"] == "my lora 2"
    monkeypatch.setattr("ui.jobs.start", lambda *_: None)
    imports.start_folder(other, str(data))
    *_, again = run_page.copy_to_new_lora(folder.name, "", other)  # every image is in a run: no question
    assert again[2]["total"] == 1 and not imports.waiting(other), "no image of the draft before comes later"
    draft.save_fields(other, {"rank": "48"})
    (question,) = run_page.copy_to_new_lora(folder.name, "", other)
    assert "The settings under New LoRA would be lost" in question[0] and draft.form(other)["rank"] == "48"


def test_drafts_that_no_page_opened_for_sixty_days_are_deleted(data):
    now, day = time.time(), 24 * 3600

    def aged(mine, days):
        draft_store.close(draft.folder(mine) / draft_store.NAME)
        for path in draft.folder(mine).glob("draft.sqlite*"):
            os.utime(path, (now - days * day,) * 2)

    ages = {days: draft.new_id() for days in (0, 59, 61)}
    for days, mine in ages.items():
        draft.save_fields(mine, {"name": f"{days}"})
        aged(mine, days)
    other = draft.folder(ages[0]).parent / "not-a-draft"
    other.mkdir()
    os.utime(other, (0, 0))
    for _ in range(2):  # that the first look opens them is no use of them
        assert [one["age"] for one in draft.recent()[1:]] == ["59 d 0 h ago", "61 d 0 h ago"]
    draft.delete_expired()
    assert [draft.folder(mine).exists() for mine in ages.values()] == [True, True, False] and other.exists()
    draft.touch(ages[59])  # a page has opened it, which restarts its expiry
    aged(ages[0], 61)
    assert new_lora.load(ages[0])[0] == ages[0]  # opening the page does the same
    draft.delete_expired()
    assert draft.form(ages[59]) == {"name": "59"} and draft.form(ages[0]) == {"name": "0"}
    assert new_lora.load(ages[61])[0] == ages[61]  # a deleted draft opens empty, without an error


def test_an_upload_is_deleted_by_its_age_only(data, mine, tmp_path):
    old, new, again = (upload(photo(tmp_path / f"{n}.png", n)) for n in range(3))
    killed, building = (data / kind / f".new-{n}" for n, kind in enumerate(("datasets", "outputs")))
    for path in (killed, building):
        path.mkdir(parents=True)
    # `again` was written a second time, which its folder does not show.
    for path in (old, old.parent, killed, again.parent):
        os.utime(path, (time.time() - 2 * draft.UPLOAD_EXPIRES_S,) * 2)
    draft.delete_expired()
    assert [path.exists() for path in (old, new, again)] == [False, True, True]
    assert [path.exists() for path in (killed, building)] == [False, True], "what a start had built when it was killed"
