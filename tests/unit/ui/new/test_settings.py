"""The settings of a draft: what was set is stored, what was not follows the model, the machine and the images."""

import json

import pytest
from draft_helpers import add_photos

from runs.machine import Machine
from ui.dataset import draft
from ui.new import form, new_lora, settings

pytestmark = pytest.mark.usefixtures("no_gpu")


def length(mine: str) -> tuple[int, int]:
    now = settings.current(mine)
    return now["repeats"], now["epochs"]


def test_a_new_draft_has_the_defaults_and_the_tier_of_this_machine(mine, monkeypatch):
    assert settings.current(mine) == {**form.defaults(), "tier": "12G", "rank": 16, "alpha": "4"}
    monkeypatch.setattr(settings, "this_machine", lambda *_: Machine("GPU", 24.0, True, 31.2, 220.0))
    assert settings.current(mine)["tier"] == "20G"


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
    add_photos(mine, tmp_path, 4)
    assert length(mine) == (24, 20)
    settings.save(mine, {"batch_size": 2}, typed=True)
    assert length(mine) == (48, 20)
    settings.save(mine, {"batch_size": 0}, typed=True)
    assert length(mine) == (10, 16), "there is no proposal for an invalid field"
    settings.save(mine, {"batch_size": 1}, typed=True)
    settings.save(mine, {"epochs": 3}, typed=True)
    add_photos(mine, tmp_path, 8)
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
