"""A foreign configuration becomes a run: every setting has one row, and what hangs is dropped."""

import contextlib
import json

import pytest
import tomlkit
from foreign_helpers import GUI, example, imported, row
from hypothesis import given, settings, strategies as st
from lint_corpus import fluxgym
from runs_helpers import spec as make
from seeds import ANY_VALUE
from tomlkit.exceptions import TOMLKitError

import presets
import runs
from runs.files import RunError
from runs.foreign import CHECKBOXES, read
from runs.foreign_spec import convert
from runs.paths import START


@pytest.mark.parametrize("tier", ["12G", "16G", "20G"])
def test_a_script_of_fluxgym_keeps_its_settings_and_its_vram_choice(tier):
    script = fluxgym(tier, True, ["--noise_offset 0.05", "--blocks_to_swap 18"])
    one = imported(("train.sh", script), ("dataset.toml", example("fluxgym_dataset.toml")), tier="8G")
    wanted = {"model": "flux-dev", "backend": "sd-scripts", "tier": tier, "rank": "4", "epochs": "16", "name": "a-name"}
    wanted |= {"resolution": 768, "batch_size": "2", "repeats": 12, "trigger": "ohwx cat", "learning_rate": "8e-4"}
    assert wanted.items() <= one.fields.items() and one.kind == "a script of FluxGym"
    assert [f.path for f in one.folders] == ["/gym/datasets/my-cat"]
    assert row(one, "blocks_to_swap").outcome == "dropped" and "forever" in row(one, "blocks_to_swap").text
    assert {key: float(value) for key, value in one.fields["extra"].items()} == {"noise_offset": 0.05}
    spec = runs.make({**one.fields, "name": "x"})
    assert spec.alpha == 1.0, "the default of kohya's trainers, which FluxGym leaves to them"
    flags = presets.tier_flags("flux-dev", "sd-scripts", tier)
    assert all(row(one, flag).outcome == "same" for flag in flags if flag != "cache_latents")


def test_what_a_file_leaves_to_its_trainer_has_the_trainers_default_and_not_the_one_of_the_form():
    script = "python sdxl_train_network.py --pretrained_model_name_or_path sd_xl_base_1.0.safetensors --network_dim 8"
    more = "--optimizer_type Adafactor --max_token_length 150 --train_data_dir /cats"
    one = imported(("t.sh", f"{script} {more}"), tier="8G")
    spec = runs.make({**one.fields, "name": "x"})
    assert [folder.path for folder in one.folders] == ["/cats"]
    off = ("min_snr_gamma", "optimizer_args", "lr_scheduler", "max_grad_norm")
    assert spec.tier == "8G" and [spec.extra[flag] for flag in off] == [False] * len(off)
    assert str(spec.extra["max_token_length"]) == "150" and not {"no_half_vae", "save_model_as"} & spec.extra.keys()
    assert "the file has none" in row(one, "min_snr_gamma").text
    changed = ("network_train_unet_only", "fp8_base", "Learning rate", "Precision")
    assert {row(one, name).outcome for name in changed} == {"changed"}
    assert (row(one, "Learning rate").value, row(one, "Precision").value) == (f"{spec.learning_rate:g}", "bf16")


def test_a_file_of_ones_own_is_used_where_it_is_here(tmp_path):
    mine, script = tmp_path / "mine.safetensors", "python flux_train_network.py --network_dim 8 --resolution large"
    mine.touch()
    files = f"--ae /else/ae.safetensors --vae {tmp_path}/gone --clip_l /else/l.sft"
    one = imported(("t.sh", f"{script} --pretrained_model_name_or_path {mine} {files}"))
    assert one.fields["extra"]["pretrained_model_name_or_path"] == str(mine)
    assert "with your own files for pretrained_model_name_or_path." in one.notes[0]
    outcomes = {name: row(one, name).outcome for name in ("ae", "clip_l", "vae", "resolution")}
    assert outcomes == {"ae": "same", "clip_l": "changed", "vae": "unsupported", "resolution": "unsupported"}


def test_a_run_of_hangproof_comes_back_as_it_was(tmp_path):
    spec = make(name="cat", backend="sd-scripts", tier="12G", rank=12, extra={"noise_offset": 0.1})
    tables = tomlkit.dumps(runs.dataset_tables(spec))
    one = imported(("train.sh", runs.script(spec, tmp_path)), ("dataset.toml", tables))
    back = runs.make({**one.fields, "name": "cat"})
    same = ("model", "backend", "tier", "rank", "alpha", "learning_rate", "epochs", "seed", "workers", "resolution")
    assert [getattr(back, key) for key in same] == [getattr(spec, key) for key in same]
    assert float(back.extra["noise_offset"]) == 0.1 and set(back.extra) == {"noise_offset"}


def test_a_file_for_a_trainer_that_is_not_here_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(tmp_path))
    first = "sd-scripts is not on this machine yet, so its options are not checked: before you press Start, run "
    notes = imported(("train.sh", fluxgym("20G"))).notes
    assert f"{first}{START} sd-scripts, or choose another trainer." in notes


def toml(table: dict) -> str:
    with contextlib.suppress(TOMLKitError, ValueError, TypeError, AttributeError):
        return tomlkit.dumps({key: value for key, value in table.items() if value is not None})
    return ""


LORA, NAME = {"LoRA_type": "Standard"}, st.text(max_size=12)


OPTIONS = NAME | st.sampled_from(["network_dim", "seed", "resolution", "resume", "optimizer_args", "datasets"])


KEYS = NAME | st.sampled_from([*GUI, *CHECKBOXES, "conv_dim", "max_grad_norm", "lr_scheduler_args", "vae", "resume"])


FLAGS = st.lists(st.builds(" \\\n --{} {}".format, OPTIONS, st.text(max_size=40)), max_size=12).map("".join)


TABLES = st.dictionaries(OPTIONS, ANY_VALUE, max_size=6).map(toml)


FILES = st.one_of(
    st.dictionaries(KEYS, ANY_VALUE, max_size=25).map(lambda t: [("x.json", json.dumps({**LORA, **t}))]),
    st.lists(st.tuples(NAME, st.text(max_size=200)), max_size=4),
    FLAGS.map(lambda flags: [("train.sh", f"python flux_train_network.py{flags}")]),
    TABLES.map(lambda text: [("dataset.toml", text), ("t.sh", fluxgym("20G"))]),
)


@settings(max_examples=60, deadline=None)
@given(FILES)
def test_no_file_is_worse_than_a_clear_message(files):
    try:
        one = convert(read(files))
    except RunError as error:
        assert str(error).strip()
        return
    runs.make({"name": "x", "model": "flux-dev", **one.fields})
    assert all(r.text and len(r.value) <= 200 for r in one.rows)
