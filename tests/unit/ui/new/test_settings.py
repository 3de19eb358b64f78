"""The settings of a draft: what was set is stored, what was not follows the model, the machine and the images."""

import json
from pathlib import Path

import pytest
from draft_helpers import drop, photo

import presets
from launch import rehearse
from runs.files import RunError
from runs.machine import Machine
from ui.dataset import draft
from ui.new import form, new_lora, run_starts, script_editor, settings

NO_GPU = Machine("", None, False, 31.2, 220.0)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(settings, "this_machine", lambda *_: NO_GPU)


def images(mine: str, folder, count: int) -> None:
    drop(mine, *(photo(folder / f"{n}.png", n) for n in range(count)))


def length(mine: str) -> tuple[int, int]:
    now = settings.current(mine)
    return now["repeats"], now["epochs"]


def test_a_new_draft_has_the_defaults_and_the_tier_of_this_machine(mine, monkeypatch):
    assert settings.current(mine) == {**form.defaults(), "tier": "12G", "rank": 16, "alpha": "4"}
    monkeypatch.setattr(settings, "this_machine", lambda *_: Machine("GPU", 24.0, True, 31.2, 220.0))
    assert settings.current(mine)["tier"] == "20G"
    for bad in ("../x", None, 7):
        with pytest.raises(RunError, match="reload"):
            settings.current(bad)


def test_a_field_is_stored_exactly_as_it_was_typed_and_the_others_stay(mine):
    strange = {"trigger": '"\\\n\x00é💥', "prompts": "</textarea><script>", "name": "   ", "rank": None, "epochs": 0}
    for key, value in strange.items():
        settings.save(mine, {key: value}, typed=True)
    assert {key: draft.form(mine)[key] for key in strange} == json.loads(json.dumps(strange))
    assert {key: settings.current(mine)[key] for key in strange} == strange
    draft.save_fields(mine, {"model": "a-model-i-removed", "unknown": 1})
    assert settings.current(mine).keys() == set(form.KEYS) and settings.current(mine)["model"] == "flux-dev"


@pytest.mark.parametrize("changes", [{"x": 1}, {"rank": [4]}, {"name": "kept", "rank": {}}, [], None])
def test_what_is_no_setting_is_refused_and_nothing_is_stored(mine, changes):
    answer = settings.save_settings({"draft": mine, "changes": changes})
    assert answer["ok"] is False and answer["error"] and draft.form(mine) == {}
    assert settings.save_settings({"draft": "../x", "changes": {"rank": 4}})["ok"] is False


def test_repeats_and_epochs_follow_the_images_until_one_of_them_is_typed(mine, tmp_path):
    assert length(mine) == (10, 16)
    images(mine, tmp_path, 4)
    assert length(mine) == (24, 20)
    settings.save(mine, {"batch_size": 2}, typed=True)
    assert length(mine) == (48, 20)
    settings.save(mine, {"batch_size": 0}, typed=True)
    assert length(mine) == (10, 16), "there is no proposal for an invalid field"
    settings.save(mine, {"batch_size": 1}, typed=True)
    settings.save(mine, {"epochs": 3}, typed=True)
    images(mine, tmp_path, 8)
    assert length(mine) == (24, 3)
    button = new_lora.review(mine)[1]
    assert button["visible"] and button["value"].startswith("Use proposed: 12 repeats × 20 epochs = 1,920 steps")
    settings.save(mine, {"max_train_steps": "9"}, typed=True)
    assert not new_lora.review(mine)[1]["visible"]
    settings.save(mine, {"max_train_steps": ""}, typed=True)
    settings.follow_images(mine)
    assert length(mine) == (12, 20) and not new_lora.review(mine)[1]["visible"]
    settings.save(mine, {"subject": "style"}, typed=True)
    assert length(mine) == (19, 20), "a style takes more steps"


def choose(mine: str, key: str, **typed) -> dict:
    """The settings after some fields were typed, and then another model was chosen."""
    for field, value in typed.items():
        settings.save(mine, {field: value}, typed=True)
    settings.save(mine, {"model": key}, typed=True)
    return settings.current(mine)


def test_a_model_sets_what_was_not_typed_and_leaves_what_was(mine):
    for typed, key, found in (
        ({"rank": 8}, "qwen-image", {"learning_rate": "5e-05", "resolution": 1024, "rank": 8, "alpha": "16"}),
        ({}, "wan22-low", {"rank": 8, "alpha": "8", "mixed_precision": "fp16"}),
        ({"learning_rate": "1e-3"}, "sd15", {"learning_rate": "1e-3", "mixed_precision": "bf16"}),
        # set back to the model's values, then followed
        ({"rank": 16, "learning_rate": "0.00010"}, "flux-dev", {"rank": 16, "alpha": "4", "learning_rate": "0.0008"}),
        ({"subject": "style"}, "sdxl", {"rank": 32, "alpha": "16"}),
    ):  # fmt: skip
        now = choose(mine, key, **typed)
        assert {name: now[name] for name in found} == found


def test_a_trainer_that_cannot_train_the_chosen_model_gives_way_and_one_chosen_after_it_stays(mine):
    assert choose(mine, "sd15", backend="diffusers")["backend"] == "sd-scripts"
    settings.save(mine, {"backend": "diffusers"}, typed=True)
    settings.save(mine, {"rank": 8}, typed=True)
    assert settings.current(mine)["backend"] == "diffusers"


def test_a_tier_that_is_too_small_changes_with_the_model_unless_the_user_chose_it(mine):
    assert choose(mine, "hunyuan-image")["tier"] == "20G"
    assert choose(mine, "flux-dev")["tier"] == "12G"
    now = choose(mine, "hunyuan-image", tier="16G")
    assert now["tier"] == "16G"
    ((kind, text),) = form.review(now, {"": 20}).marks()["tier"]
    assert kind == "bad" and "HunyuanImage 2.1 does not fit" in text and "20G" in text
    assert choose(mine, "z-image")["tier"] == "16G"


def test_a_draft_of_the_api_follows_its_model_and_images_as_on_the_page(data, mine, tmp_path):
    from ui.api import drafts

    made = drafts.new_draft()
    for one in (made, mine):
        images(one, tmp_path, 4)
        settings.save(one, {"model": "sd15"}, typed=one == mine)
    assert drafts.review_draft(made)["settings"] == settings.current(mine)
    with pytest.raises(RunError, match="There is no setting 'rnak'; use some of name, trigger"):
        drafts.set_settings(made, {"rnak": 4})
    with pytest.raises(RunError, match="rank: a setting is a text, a number or null"):
        drafts.set_settings(made, {"rank": [4]})


def test_a_table_of_models_that_becomes_invalid_while_the_page_is_open_loses_nothing(data, mine, tmp_path):
    images(mine, tmp_path, 1)
    (data / "models.toml").write_text("[models.")
    typed = {"trigger": "kept", "epochs": 3, "model": "tiny-flux"}
    assert settings.save_settings({"draft": mine, "changes": typed}) == {"ok": True, "values": typed, "marks": {}}
    with pytest.raises(presets.PresetError):
        settings.current(mine)
    assert "models.toml" in new_lora.review(mine)[0]
    opened = new_lora.load(mine)
    assert opened[0] == mine and "models.toml" in opened[2] and opened[3 + form.KEYS.index("trigger")] == "kept"
    *_, (problem, name, _) = new_lora.start(mine, {})
    assert "models.toml" in problem and name == "" and not list((data / "outputs").glob("*"))
    (data / "models.toml").unlink()
    assert settings.current(mine)["trigger"] == "kept" and len(draft.items(mine)) == 1


@pytest.mark.parametrize("key", list(new_lora.NOT_ARRIVED))
def test_start_refuses_while_the_browser_holds_something(mine, key):
    *_, (problem, name, _) = new_lora.start(mine, {key: 2})
    assert "not saved" in problem or "not uploaded" in problem
    assert name == ""


def test_start_asks_once_about_images_that_nothing_describes_and_about_a_failed_rehearsal(mine, tmp_path, monkeypatch):
    begun: list[Path] = []
    monkeypatch.setattr("ui.run.control.start", begun.append)

    def start() -> tuple[str, str]:
        *_, (problem, name, _) = new_lora.start(mine, {})
        return problem, name

    images(mine, tmp_path, 2)
    settings.save(mine, {"name": "bare", "model": "tiny-flux"}, typed=True)
    assert "2 of 2 images have no caption" in new_lora.review(mine)[0], "the plan says so before"
    problem, name = start()
    assert (
        "2 of 2 images have no caption" in problem and "again to start anyway" in problem and (name, begun) == ("", [])
    )

    spec = script_editor.for_run(mine, run_starts.checked(mine)[0])
    stages = [{"key": "load", "title": "Load", "state": rehearse.FAILED}]
    failed = {
        "state": rehearse.FAILED,
        "digest": rehearse.digest(spec),
        "stages": stages,
        "asked": True,
    }  # of old versions
    failed |= {"problem": {"stage": "Load", "title": "No memory."}}
    rehearsed = run_starts.rehearsal_folder(mine)
    rehearsed.mkdir()
    (rehearsed / rehearse.FILE).write_text(json.dumps(failed))
    problem, name = start()
    assert (
        "have no caption" in problem and "failed at “Load”: No memory. Press" in problem and (name, begun) == ("", [])
    )
    assert start() == ("", "bare") and [one.name for one in begun] == ["bare"]

    settings.save(mine, {"name": "described", "trigger": "tok"}, typed=True)
    (rehearsed / rehearse.FILE).unlink()
    assert start() == ("", "described")
