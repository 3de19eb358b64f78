"""The form: its values become a spec, and what is wrong with them stands beside the fields and at Start."""

from pathlib import Path

import pytest
from configure_helpers import GPU, NO_GPU, PAIRS, add_pictures, values
from draft_helpers import create_run
from runs_helpers import picture, pictures

import presets
import runs
from runs import folders
from runs.files import Fault
from runs.machine import Machine
from ui.dataset import draft
from ui.new import form


def test_the_initial_form_is_valid_except_for_its_name():
    with pytest.raises(runs.RunError) as caught:
        form.spec_of(form.defaults())
    assert caught.value.faults == (Fault("name", "Give your LoRA a name"),)
    assert form.spec_of({**form.defaults(), "name": "x"}) == runs.make({"name": "x", "sample_every_n_steps": None})


def test_fields_become_the_spec():
    typed = {"prompts": "a cat\n\n a dog ", "max_train_steps": "12", "learning_rate": "1e-4", "rank": 8}
    spec = form.spec_of(values(**typed, flags="weighting_scheme=none"))
    assert spec.prompts == ["a cat", " a dog "] and spec.max_train_steps == 12 and spec.learning_rate == 1e-4
    assert spec.rank == 8 and spec.extra == {"weighting_scheme": "none"}


def test_an_error_stands_beside_its_field_and_has_its_label_elsewhere():
    for given, shown in (
        ({"name": "///"}, "Name: Use at least one letter or digit"),
        ({"name": None}, "Name: Give your LoRA a name"),
        ({"epochs": None}, "Epochs: Enter a value; the default is 16"),
        ({"epochs": 0}, "Epochs: Must be 1 or more"),
        ({"learning_rate": "0,0001"}, "Learning rate: Not a number; write for example 0.0001"),
        ({"resolution": 500}, "Resolution: Must be a multiple of 32"),
        ({"max_train_steps": "many"}, "Maximum steps: Not a whole number; write for example 4"),
        ({"seed": "1.5"}, "Seed: Not a whole number; write for example 4"),
        ({"tier": "9G"}, "VRAM: Must be one of 8G, 12G, 16G, 20G"),
        ({"model": "flux-dev2pro", "backend": "diffusers"}, "Trainer: diffusers cannot train flux-dev2pro"),
        ({"flags": "rank 5"}, "Extra trainer options: 'rank 5' is not KEY=VALUE; write for example rank=16"),
        ({"flags": "max_grad_nrm=1"}, "Extra trainer options: max_grad_nrm: diffusers has no such flag; did you mean"),
        ({"flags": "keep_tokens=-1"}, "Extra trainer options: keep_tokens: Must be 0 or more"),
        ({"flags": "gpus=0"}, "GPUs per machine: Must be 1 or more"),
        ({"flags": "optimizer_args=[1"}, "Extra trainer options: optimizer_args: '[1' is not a JSON list"),
        ({"flags": "output_dir=/"}, "Extra trainer options: output_dir: The run's folder determines this flag"),
        ({"flags": "network_dim=many"}, "Rank: Not a whole number; write for example 4"),
    ):
        with pytest.raises(runs.RunError) as caught:
            form.spec_of(values(**given))
        (line,) = [form.shown(fault) for fault in caught.value.faults]
        assert line.startswith(shown)
        label, _, sentence = shown.partition(": ")
        (key,) = [key for key, text in form.LABELS.items() if text == label]
        marks = form.review(values(**given), {"": 20}).marks(starting=True)
        assert marks[key][0][0] == "bad" and marks[key][0][1].startswith(sentence)


def test_the_trainers_own_parser_judges_a_flag_while_it_is_typed():
    for line, shown in (
        ("lr_scheduler=cosinus", "lr_scheduler: cosinus: not supported; use constant or"),
        ("optimizer_args=weight_dekay=0.1", "optimizer_args: weight_dekay: not an option of adamw8bit; use betas"),
        ("lr_warmup_steps=ten", "lr_warmup_steps: Must be a number, not 'ten'"),
        ("clip_skip=2", "clip_skip: The built-in trainer does not support it"),
    ):
        marks = form.review(values(backend="diffusers", flags=line), {"": 20}).marks()
        assert [kind for kind, _ in marks["flags"]] == ["bad"] and marks["flags"][0][1].startswith(shown)


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


def test_the_script_shown_is_the_script_written(data, mine, tmp_path):
    add_pictures(mine, tmp_path, 2)
    shown = form.script_of(form.review(values(), draft.counts(mine)))
    folder, _ = create_run(mine, values())
    assert (folder / "train.sh").read_text(encoding="utf-8") == shown


def test_the_plan_counts_the_steps_and_findings_are_listed_with_labels():
    assert "<strong>320 steps</strong>" in form.plan(form.review(values(), {"": 2}))
    assert "<strong>48,000 steps</strong>" in form.plan(form.review(values(), {"": 300}))
    assert "Add images" in form.plan(form.review(values(), {"": 0}))
    found = form.findings(form.review(values(flags="<i>=1"), {"": 2}, GPU))
    assert 'class="hp-bad">Extra trainer options: ' in found and "&lt;i&gt;" in found and "<i>" not in found
    assert 'class="hp-warn">Learning rate: ' in form.findings(form.review(values(learning_rate="5"), {"": 2}, GPU))
    assert form.findings(form.review(values(), {"": 2})) == ""


def test_the_script_names_the_errors_that_prevent_it():
    shown = form.script_of(form.review(values(epochs=None), {"": 2}))
    head = "# The script appears here once these errors are fixed:\n"
    assert shown == head + "# Epochs: Enter a value; the default is 16\n"


def test_every_model_can_be_chosen_and_its_label_names_its_family():
    choices = form.model_choices()
    assert sorted(key for _, key in choices) == sorted(presets.models())
    assert len({label for label, _ in choices}) == len(choices)
    labels = {key: label for label, key in choices}
    assert labels["illustrious"] == "Illustrious XL 0.1 · SDXL" and labels["sdxl"] == "SDXL 1.0"
    families = [presets.models()[key]["family"] for _, key in choices]
    assert families == sorted(families, key=families.index)  # those of a family are together


@pytest.mark.parametrize(("key", "backend"), PAIRS)
def test_the_values_of_a_model_are_valid_for_it(data, key, backend):
    set_by_page = form.model_values(key, backend, "person", NO_GPU)
    assert set_by_page["backend"] == backend
    assert form.parse(values(**set_by_page, model=key))[1] == []


def test_a_gpu_chooses_the_tier_that_fits_it_and_the_model():
    small_gpu = Machine("NVIDIA GeForce RTX 4060", 8.0, True, 31.2, 220.0)
    assert form.model_values("z-image", "musubi", "person", small_gpu)["tier"] == "8G"
    assert form.model_values("flux-dev", "diffusers", "person", small_gpu)["tier"] == "12G"


def test_the_folder_of_control_images_belongs_to_models_that_learn_from_pairs(data, mine, tmp_path):
    add_pictures(mine, tmp_path / "in", 2)
    pairs = values(model="flux-kontext", **form.model_values("flux-kontext", "musubi", "person", NO_GPU))
    open_yet = form.review(pairs, {"": 2}, NO_GPU)
    assert "control_dir" not in open_yet.marks()
    assert "learns from pairs" in open_yet.marks(starting=True)["control_dir"][0][1]
    wrong = form.review({**pairs, "control_dir": str(tmp_path / "none")}, {"": 2}, NO_GPU).marks()
    assert wrong["control_dir"][0][1].startswith("There is no folder")
    (tmp_path / "pairs").mkdir()
    stems = [Path(item.folder) / Path(item.file).stem for item in draft.items(mine)]
    pairs["control_dir"] = f" {tmp_path / 'pairs'} "
    spec = form.parse(pairs)[0]
    assert spec.control_dir == str(tmp_path / "pairs")
    assert "control_dir" not in form.review(pairs, {"": 2}, NO_GPU).marks()
    assert folders.unpaired(spec, stems).message.startswith("No control image 0.* in ")
    for n in range(2):
        picture(tmp_path / "pairs" / f"{n}.jpg", size=(96, 64))
    assert folders.unpaired(spec, stems) is None
    assert form.values_of_spec(spec, {"": 2})["control_dir"] == spec.control_dir
    z_image = {**pairs, **form.model_values("z-image", "musubi", "person", NO_GPU), "model": "z-image"}
    assert form.parse(z_image)[0].control_dir == ""
