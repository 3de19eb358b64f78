"""The form: its values become a spec, and what is wrong stands beside the fields and at Start. The settings of a
draft: what was set is stored, what was not follows the model, the machine and the images."""

import json
import math

import hypothesis
import pytest
from configure_helpers import GPU, NO_GPU, values
from draft_helpers import add_photos, create_run, drop, photo
from hypothesis import strategies as st
from runs_helpers import pictures

import presets
import runs
from monitor.process.platform import LOCK, Lock
from runs.files import Fault
from runs.machine import Machine
from ui.dataset import draft
from ui.dataset.images import image_action
from ui.new import form, new_lora, summary
from ui.new.form import LEAST, MOST, propose

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_fields_become_the_spec_and_the_initial_ones_are_valid_except_for_the_name():
    with pytest.raises(runs.RunError) as caught:
        form.spec_of(form.defaults())
    assert caught.value.faults == (Fault("name", "Give your LoRA a name"),)
    assert form.spec_of({**form.defaults(), "name": "x"}) == runs.make({"name": "x", "sample_every_n_steps": None})

    typed = {"prompts": "a cat\n\n a dog ", "max_train_steps": "12", "learning_rate": "1e-4", "rank": 8}
    spec = form.spec_of(values(**typed, flags="weighting_scheme=none"))
    assert spec.prompts == ["a cat", " a dog "] and spec.max_train_steps == 12 and spec.learning_rate == 1e-4
    assert spec.rank == 8 and spec.extra == {"weighting_scheme": "none"}


def test_an_error_stands_beside_its_field_and_has_its_label_elsewhere():
    for given, shown in (
        ({"name": "///"}, "Name: Use at least one letter or digit"),
        ({"epochs": None}, "Epochs: Enter a value; the default is 16"),
        ({"epochs": 0}, "Epochs: Must be 1 or more"),
        ({"learning_rate": "0,0001"}, "Learning rate: Not a number; write for example 0.0001"),
        ({"max_train_steps": "many"}, "Maximum steps: Not a whole number; write for example 4"),
        ({"tier": "9G"}, "VRAM: Must be one of 8G, 12G, 16G, 20G"),
        ({"model": "flux-dev2pro", "backend": "diffusers"}, "Trainer: diffusers cannot train flux-dev2pro"),
        ({"flags": "rank 5"}, "Extra trainer options: 'rank 5' is not KEY=VALUE; write for example rank=16"),
        ({"flags": "keep_tokens=-1"}, "Extra trainer options: keep_tokens: Must be 0 or more"),
        ({"flags": "network_dim=many"}, "Rank: Not a whole number; write for example 4"),
        ({"flags": "lr_warmup_steps=ten"}, "Extra trainer options: lr_warmup_steps: Must be a number, not 'ten'"),
    ):
        with pytest.raises(runs.RunError) as caught:
            form.spec_of(values(**given))
        (line,) = [form.shown(fault) for fault in caught.value.faults]
        assert line.startswith(shown)
        label, _, sentence = shown.partition(": ")
        (key,) = [key for key, text in form.LABELS.items() if text == label]
        marks = form.review(values(**given), {"": 20}).marks(starting=True)
        assert marks[key][0][0] == "bad" and marks[key][0][1].startswith(sentence)


def test_all_errors_are_reported_at_once_by_field():
    flags = "rank 5\noutput_dir=/\nmax_grad_nrm=1"
    given = values(epochs=0, rank=None, learning_rate="fast", flags=flags, resolution=500)
    found = form.review(given, {"": 20}).marks()
    assert set(found) == {"epochs", "rank", "learning_rate", "flags", "resolution"}
    assert found["rank"] == [["bad", "Enter a value; the default is 4"]]
    assert "KEY=VALUE" in found["flags"][0][1] and "output_dir" in found["flags"][1][1]


def test_what_is_not_entered_yet_is_an_error_only_at_the_start():
    typed = form.review(values(name=""), {"": 0})
    assert typed.marks() == {} and typed.spec is not None
    assert typed.marks(starting=True) == {"name": [["bad", "Give your LoRA a name"]]}
    assert [fault.field for fault in typed.missing] == ["name", "images"]


def test_a_taken_name_is_shown_while_it_is_typed_also_in_another_case(data, tmp_path):
    runs.create(form.spec_of(values(name="First Light")), pictures(tmp_path / "in"))
    other_case = "A run named 'First-Light' already exists, and Windows and macOS do not tell it from 'first-light'"
    (data / "datasets" / "Old-Set").mkdir()
    same = "A run named 'First Light' already exists in "
    for name, text in (("First Light", same), ("first light", other_case), ("old set", "A data set named 'Old-Set'")):
        marks = form.review(values(name=name), {"": 2}).marks()
        assert marks["name"][0][0] == "bad" and marks["name"][0][1].startswith(text)
    assert "name" not in form.review(values(name="Second Light"), {"": 2}).marks()


def test_the_script_shown_is_the_script_written_or_the_errors_that_prevent_it(data, mine, tmp_path):
    add_photos(mine, tmp_path, 2)
    given = values(flags=f"save_dir={tmp_path}/fast")
    shown, _ = form.script_of(form.review(given, draft.counts(mine)))
    folder, _ = create_run(mine, given)
    assert f"--output_dir {tmp_path}/fast/{folder.name} " in shown
    assert (folder / "train.sh").read_text(encoding="utf-8") == shown
    shown, ready = form.script_of(form.review(values(epochs=None), {"": 2}))
    head = "# The script appears here once these errors are fixed:\n"
    assert shown == head + "# Epochs: Enter a value; the default is 16\n" and not ready


def test_a_warning_counts_the_batches_of_each_bucket_as_the_plan_does(mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", 1), photo(tmp_path / "b.png", 2, size=(64, 96)))
    form.save(mine, values(model="flux-dev", repeats=3, epochs=2, batch_size=2))
    found = form.reviewed(mine)
    assert found.steps == 8 and "only 8 steps" in str(found.warnings)


def test_the_memory_that_a_run_under_way_uses_is_free_when_the_next_one_starts(data, mine, tmp_path, monkeypatch):
    add_photos(mine, tmp_path, 2)
    form.save(mine, values(model="flux-dev", tier="20G"))
    machine = Machine("RTX 4090", 24.0, True, 400.0, vram_free_gb=3.0)
    monkeypatch.setattr(form, "this_machine", lambda *_: machine)
    assert "RTX 4090 are free now" in str(form.reviewed(mine).warnings)
    lock = Lock(data / "outputs" / "first" / LOCK)
    assert lock.acquire() and "free now" not in str(form.reviewed(mine).warnings)
    lock.release()


def test_the_plan_counts_the_steps_and_findings_are_listed_with_labels():
    assert "<strong>320 steps</strong>" in summary.plan(form.review(values(), {"": 2}))
    assert "<strong>48,000 steps</strong>" in summary.plan(form.review(values(), {"": 300}))
    assert "Add images" in summary.plan(form.review(values(), {"": 0}))
    assert "With one image" in summary.plan(form.review(values(), {"": 1}))
    assert "× 16 epochs = <strong>32" in summary.plan(form.review(values(repeats=1), {"": 2}))
    several = values(batch_size=2, gradient_accumulation=3, validation_split="0.2")
    shown = summary.plan(form.review({**several, "gpus": 2}, {"": 10, "3_cat": 10}))
    assert "20 images, 4 held out, shown 104 times an epoch × 16 epochs ÷ batch 12 = <strong>144 steps" in shown
    shown = summary.plan(form.review({**several, "max_train_steps": "70"}, {"": 10}))
    assert "10 images, 2 held out, batch 6: <strong>70 steps" in shown
    found = summary.findings(form.review(values(flags="<i>=1"), {"": 2}, GPU))
    assert 'class="hp-bad">Extra trainer options: ' in found and "&lt;i&gt;" in found and "<i>" not in found
    assert 'class="hp-warn">Learning rate: ' in summary.findings(form.review(values(learning_rate="5"), {"": 2}, GPU))
    assert summary.findings(form.review(values(), {"": 2})) == ""


def test_a_weight_that_makes_too_many_repeats_is_a_fault_of_the_images_and_the_page_opens(mine, tmp_path):
    drop(mine, (photo(tmp_path / "a.png", 1), "2024_trip/a.png"))
    form.save(mine, {"name": "x"})
    ids = [one.id for one in draft.items(mine)]
    answer = image_action({"action": "weight", "draft": mine, "ids": ids, "weight": 5})
    assert answer["ok"] and new_lora.load(mine)[0] == mine
    (fault,) = form.reviewed(mine).faults
    assert fault == Fault("images", "2024_trip: 2024 repeats × weight 5 is more than 9999; lower one of them")


def test_every_model_can_be_chosen_and_its_label_names_its_family():
    choices = summary.model_choices()
    assert sorted(key for _, key in choices) == sorted(presets.models())
    assert len({label for label, _ in choices}) == len(choices)
    labels = {key: label for label, key in choices}
    assert labels["illustrious"] == "Illustrious XL 0.1 · SDXL" and labels["sdxl"] == "SDXL 1.0"
    families = [presets.models()[key]["family"] for _, key in choices]
    assert families == sorted(families, key=families.index)  # those of a family are together


def test_the_folder_of_control_images_belongs_to_models_that_learn_from_pairs(data, tmp_path):
    pairs = values(model="flux-kontext", **form.model_values("flux-kontext", "musubi", "person", NO_GPU))
    open_yet = form.review(pairs, {"": 2}, NO_GPU)
    assert "control_dir" not in open_yet.marks()
    assert "learns from pairs" in open_yet.marks(starting=True)["control_dir"][0][1]
    wrong = form.review({**pairs, "control_dir": str(tmp_path / "none")}, {"": 2}, NO_GPU).marks()
    assert wrong["control_dir"][0][1].startswith("There is no folder")
    (tmp_path / "pairs").mkdir()
    pairs["control_dir"] = f" {tmp_path / 'pairs'} "
    spec = form.parse(pairs)[0]
    assert spec.control_dir == str(tmp_path / "pairs")
    assert "control_dir" not in form.review(pairs, {"": 2}, NO_GPU).marks()
    assert form.values_of_spec(spec, {"": 2})["control_dir"] == spec.control_dir
    z_image = {**pairs, **form.model_values("z-image", "musubi", "person", NO_GPU), "model": "z-image"}
    assert form.parse(z_image)[0].control_dir == ""


def length(mine: str) -> tuple[int, int]:
    now = form.current(mine)
    return now["repeats"], now["epochs"]


def test_a_new_draft_has_the_defaults_and_the_tier_of_this_machine(mine, monkeypatch):
    assert form.current(mine) == {**form.defaults(), "tier": "12G", "rank": 16, "alpha": "4"}
    for vram_gb, model, tier in ((24.0, "flux-dev", "20G"), (8.0, "flux-dev", "12G"), (8.0, "z-image", "8G")):
        gpu = Machine("GPU", vram_gb, True, 220.0)
        monkeypatch.setattr(form, "this_machine", lambda *_, gpu=gpu: gpu)
        assert choose(mine, model)["tier"] == tier


def test_a_field_is_stored_exactly_as_it_was_typed_and_the_others_stay(mine):
    strange = {"trigger": '"\\\n\x00é💥', "prompts": "</textarea><script>", "name": "   ", "rank": None, "epochs": 0}
    for key, value in strange.items():
        form.save(mine, {key: value}, typed=True)
    assert {key: draft.form(mine)[key] for key in strange} == json.loads(json.dumps(strange))
    assert {key: form.current(mine)[key] for key in strange} == strange
    draft.save_fields(mine, {"model": "a-model-i-removed", "unknown": 1})
    assert form.current(mine).keys() == set(form.KEYS) and form.current(mine)["model"] == "flux-dev"


def test_values_of_a_program_that_no_field_of_the_page_gives_leave_the_draft_readable(mine, tmp_path):
    add_photos(mine, tmp_path, 1)
    form.save(mine, {"name": 2024, "trigger": 7, "prompts": 1.5, "flags": True, "control_dir": 0})
    texts = {"name": "2024", "trigger": "7", "prompts": "1.5", "flags": "True", "control_dir": "0"}
    assert {key: form.reviewed(mine).values[key] for key in texts} == texts
    for number in (float("inf"), float("nan"), 1e300):
        form.save(mine, {"batch_size": number, "gradient_accumulation": number})
        assert new_lora.load(mine)[0] == mine and form.reviewed(mine).faults


@pytest.mark.parametrize("changes", [{"x": 1}, {"rank": [4]}, {"rank": 10**20}, {"name": "kept", "rank": {}}, [], None])
def test_what_is_no_setting_is_refused_and_nothing_is_stored(mine, changes):
    answer = image_action({"action": "save_settings", "draft": mine, "changes": changes})
    assert answer["ok"] is False and len(answer["error"]) > 10 and draft.form(mine) == {}
    assert image_action({"action": "save_settings", "draft": "../x", "changes": {"rank": 4}})["ok"] is False


def test_a_choice_that_does_not_exist_is_refused_and_not_replaced_by_another_one(mine):
    for key, message in (
        ("model", "Base model: there is no 'flux1-dev'; use one of flux-dev, "),
        ("tier", "VRAM: there is no 'flux1-dev'; use one of 8G, 12G, 16G, 20G$"),
        ("backend", "Trainer: there is no 'flux1-dev'; use one of diffusers, sd-scripts, musubi$"),
        ("subject", "there is no 'flux1-dev'; use one of person, style, object$"),
        ("mixed_precision", "Precision: there is no 'flux1-dev'; use one of "),
    ):
        with pytest.raises(runs.RunError, match=message):
            form.save(mine, {"rank": 8, key: "flux1-dev"})
    assert draft.form(mine) == {}
    form.save(mine, {"model": None, "trackers": ""})
    assert form.current(mine)["model"] == "flux-dev"


def test_repeats_and_epochs_follow_the_images_until_one_of_them_is_typed(mine, tmp_path):
    assert length(mine) == (10, 16)
    add_photos(mine, tmp_path, 4)
    assert length(mine) == (24, 20)
    form.save(mine, {"batch_size": 2}, typed=True)
    assert length(mine) == (48, 20)
    form.save(mine, {"batch_size": 0}, typed=True)
    assert length(mine) == (10, 16), "there is no proposal for an invalid field"
    form.save(mine, {"batch_size": 1}, typed=True)
    form.save(mine, {"epochs": 3}, typed=True)
    add_photos(mine, tmp_path, 8)
    assert length(mine) == (24, 3)


def test_a_style_takes_more_steps(mine, tmp_path):
    add_photos(mine, tmp_path, 8)
    assert length(mine) == (12, 20)
    form.save(mine, {"subject": "style"}, typed=True)
    assert length(mine) == (19, 20)


def choose(mine: str, key: str, **typed) -> dict:
    """The settings after some fields were typed, and then another model was chosen."""
    for field, value in typed.items():
        form.save(mine, {field: value}, typed=True)
    form.save(mine, {"model": key}, typed=True)
    return form.current(mine)


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
    form.save(mine, {"backend": "diffusers"}, typed=True)
    form.save(mine, {"rank": 8}, typed=True)
    assert form.current(mine)["backend"] == "diffusers"


def test_a_tier_that_is_too_small_changes_with_the_model_unless_the_user_chose_it(mine):
    assert choose(mine, "hunyuan-image")["tier"] == "20G"
    assert choose(mine, "flux-dev")["tier"] == "12G"
    now = choose(mine, "hunyuan-image", tier="16G")
    assert now["tier"] == "16G"
    ((kind, text),) = form.review(now, {"": 20}).marks()["tier"]
    assert kind == "bad" and "HunyuanImage 2.1 does not fit" in text and "20G" in text
    assert choose(mine, "z-image")["tier"] == "16G"


IMAGES, BATCH, ACCUMULATION = st.integers(1, 5000), st.integers(1, 64), st.integers(1, 32)


def steps_per_epoch(images: int, repeats: int, fixed: int, batch: int, accumulation: int) -> int:
    return math.ceil(math.ceil((images * repeats + fixed) / batch) / accumulation)


def distance(steps: int) -> int:
    return max(LEAST - steps, steps - MOST, 0)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(IMAGES, st.one_of(st.just(0), st.integers(1, 20_000)), BATCH, ACCUMULATION)
def test_the_steps_are_those_of_the_plan_and_as_near_to_the_range_as_any_choice(images, fixed, batch, accumulation):
    found = propose(images, fixed, batch, accumulation)
    assert found.repeats >= 1 and found.epochs >= 1
    each = steps_per_epoch(images, found.repeats, fixed, batch, accumulation)
    assert found.steps == found.epochs * each
    if found.steps == found.epochs * each and LEAST <= found.steps <= MOST:
        return
    for repeats in range(1, 51):
        other = steps_per_epoch(images, repeats, fixed, batch, accumulation)
        for epochs in {max(1, LEAST // other), LEAST // other + 1, max(1, MOST // other)}:
            assert distance(found.steps) <= distance(epochs * other), (found, repeats, epochs)


def test_usual_data_sets_get_usual_settings():
    run = presets.defaults()["run"]
    for images, fixed, wanted in (
        (10, 0, (10, 20, 2000)), (20, 0, (10, 10, 2000)), (50, 0, (5, 8, 2000)), (100, 0, (2, 10, 2000)),
        (300, 0, (1, 8, 2400)), (5000, 0, (1, 1, 5000)), (1, 0, (96, 20, 1920)), (12, 0, (10, 17, 2040)),
        (24, 0, (10, 8, 1920)), (0, 200, (1, 10, 2000)),
        (0, 0, (run["repeats"], run["epochs"], propose(0).steps)),
    ):  # fmt: skip
        found = propose(images, fixed=fixed)
        assert (found.repeats, found.epochs, found.steps) == wanted, (images, fixed)
    assert all(LEAST <= propose(images).steps <= MOST for images in range(1, 1251)), "at batch size 1"
