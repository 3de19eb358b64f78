"""Configurations of other trainers become runs: every setting has one row, what hangs is dropped, nothing is executed."""

import contextlib
import json
import os

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st
from lint_corpus import fluxgym
from runs_helpers import PROJECT
from runs_helpers import spec as make
from strategies import ANY_VALUE
from tomlkit.exceptions import TOMLKitError

import presets
import runs
from runs.files import RunError
from runs.foreign import MAX_FILES, MAX_SCRIPT, read
from runs.foreign_programs import CHECKBOXES
from runs.foreign_programs import GUI as NAMES
from runs.foreign_spec import convert


def example(name: str) -> str:
    return (PROJECT / "tests/support/data/foreign" / name).read_text(encoding="utf-8")


GUI = json.loads(example("kohya_ss.json"))


def imported(*texts, tier=""):
    return convert(read([(name, text) for name, text in texts]), tier)


def row(one, name):
    found = [r for r in one.rows if r.name in (name, f"--{name}")]
    assert len(found) == 1, (name, found)
    return found[0]


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


def test_a_json_of_kohya_ss_means_what_its_gui_writes_as_flags():
    one = imported(("x.json", json.dumps(GUI)), tier="12G")
    wanted = {"model": "flux-dev", "rank": "16", "alpha": "8", "batch_size": "2", "resolution": 768, "tier": "12G"}
    wanted |= {"max_train_steps": "1200", "learning_rate": "0.0003", "prompts": ["a cat --w 512", "a dog"]}
    wanted |= {"trigger": "ohwx cat"}
    assert wanted.items() <= one.fields.items() and "epochs" not in one.fields and "seed" not in one.fields
    extra = {key: value if isinstance(value, list) else str(value) for key, value in one.fields["extra"].items()}
    assert extra["optimizer_type"] == "Prodigy" and extra["optimizer_args"] == ["decouple=True", "weight_decay=0.01"]
    assert extra["lr_warmup_steps"] == "0.1" and extra["max_timestep"] == "900" and extra["unet_lr"] == "0.0002"
    assert extra["lr_scheduler"] == "cosine" and "multires_noise_iterations" not in extra and "no_half_vae" not in extra
    assert extra["max_grad_norm"] == "False", "of the VRAM choice's own optimizer"
    assert row(one, "xformers").outcome == "changed" and one.folders[0].path == "/data/cats"
    secret = row(one, "wandb_api_key")
    assert secret.outcome == "changed" and "kept apart" in secret.text and "sk-very" not in str(one.rows)
    assert one.fields["environment"] == {"WANDB_API_KEY": "sk-very-secret"}
    assert "wandb_api_key" not in one.fields["extra"]


def test_each_checkbox_of_the_gui_is_a_family_and_each_type_of_lora_is_taken_over_or_refused_with_a_reason():
    for box in (*CHECKBOXES, ""):
        gui = {"LoRA_type": "Standard", "network_dim": 8, "learning_rate": 1e-4, **({box: True} if box else {})}
        found = presets.trainer_of(imported(("x.json", json.dumps(gui))).fields["model"], "sd-scripts")
        assert found["script"] == CHECKBOXES.get(box, "train_network.py")
    for kind in (*NAMES["networks"], "LyCORIS/LoHa", "", None, 7):
        gui = {"LoRA_type": kind, "network_dim": 128, "network_alpha": 1, "conv_dim": 8, "sdxl": True, "factor": -1}
        one = imported(("x.json", json.dumps(gui)))
        assert one.fields.get("rank") == ("128" if kind in NAMES["networks"] else None)
        assert kind in NAMES["networks"] or "lycoris-lora" in row(one, "LoRA_type").text


def test_a_job_of_ai_toolkit_gives_its_length_prompts_and_resolution():
    one = imported(("job.yaml", example("ai_toolkit.yaml")))
    wanted = {"model": "flux-dev", "rank": "16", "max_train_steps": "2000", "resolution": 1024, "trigger": "p3r5on"}
    assert (wanted | {"learning_rate": "1e-4", "prompts": ["a cat", "a dog"]}).items() <= one.fields.items()
    assert row(one, "train.ema_config").outcome == "unsupported"


def test_a_config_file_and_bare_options_need_no_script():
    toml = '[model]\npretrained_model_name_or_path = "/m/sd_xl_base_1.0.safetensors"\n[train]\nnetwork_dim = 24\n'
    toml += 'network_module = "networks.lora"\nmax_train_steps = 700\nfused_backward_pass = true\n'
    one = imported(("config.toml", toml))
    assert one.fields["model"] == "sdxl" and one.fields["max_train_steps"] == "700"
    assert row(one, "fused_backward_pass").outcome == "dropped"
    text = "--network_dim 12 --learning_rate=2e-4 --pretrained_model_name_or_path flux1-dev.safetensors"
    one = imported(("", f"{text} --max_train_epochs 3 --validation_split 0.1 --validate_every_n_steps 50"))
    assert one.fields["rank"] == "12" and one.fields["model"] == "flux-dev" and one.fields["epochs"] == "3"
    assert (one.fields["validation_split"], one.fields["validate_every_n_steps"]) == ("0.1", "50")


def test_a_command_of_musubi_tuner_is_found_without_the_guarded_launcher():
    script = "accelerate launch src/musubi_tuner/zimage_train_network.py"
    one = imported(("", f"{script} --dit x/z_image_bf16.safetensors --network_dim 32"))
    assert (one.fields["model"], one.fields["backend"], one.fields["rank"]) == ("z-image", "musubi", "32")
    assert one.kind == "a command of musubi-tuner"


def test_a_run_of_hangproof_comes_back_as_it_was(tmp_path):
    spec = make(name="cat", backend="sd-scripts", tier="12G", rank=12, extra={"noise_offset": 0.1})
    one = imported(
        ("train.sh", runs.script(spec, tmp_path)), ("dataset.toml", tomlkit.dumps(runs.dataset_tables(spec)))
    )
    back = runs.make({**one.fields, "name": "cat"})
    same = ("model", "backend", "tier", "rank", "alpha", "learning_rate", "epochs", "seed", "workers", "resolution")
    assert [getattr(back, key) for key in same] == [getattr(spec, key) for key in same]
    assert float(back.extra["noise_offset"]) == 0.1 and set(back.extra) == {"noise_offset"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello there", "this is not a train.sh"),
        ("", "nothing to import"),
        ('{"a": 1}', "none of kohya_ss"),
        ('{"train_data_dir": "x"}', "trains no LoRA"),
        ('{"LoRA_type": "Standard", "v2": true}', "Stable Diffusion 2"),
        ("[[datasets]\n", "not valid TOML"),
        ("config: {process: [{model: {arch: unheard-of}}]}", "no base model"),
        ("python train_db.py --learning_rate 1", "no base model for this script"),
        ("x\0y", "NUL"),
        ("x" * (MAX_SCRIPT + 1), "larger than"),
        ('{"LoRA_type": ' + "[" * 20000, "nested too deeply"),
    ],
)
def test_what_cannot_be_imported_says_why(text, words):
    with pytest.raises(RunError) as error:
        imported(("", text))
    assert words in str(error.value)
    with pytest.raises(RunError, match="too many"):
        read([("x", "y")] * (MAX_FILES + 1))


def test_references_of_yaml_that_multiply_cost_nothing():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    job = "{network: *a11, train: {lr: *a11, steps: 5, x: *a11}, model: {is_flux: true}}"
    text = "\n".join([*lines, f"config: {{name: *a11, process: [{job}]}}"])
    assert imported(("", text)).fields["max_train_steps"] == "5"


def test_nothing_of_an_imported_script_is_executed(tmp_path, monkeypatch):
    flag = tmp_path / "executed"
    monkeypatch.setattr(os, "system", lambda *_: flag.touch())
    text = f"touch {flag}\nX=$(touch {flag})\naccelerate launch `touch {flag}` flux_train_network.py --network_dim $(touch {flag}; echo 4)"
    text += f' --learning_rate 1e-4 --output_name "$(touch {flag})" --x "; touch {flag}"\n'
    one = imported(("train.sh", text))
    assert not flag.exists()
    assert row(one, "network_dim").outcome == "unsupported" and one.fields["learning_rate"] == "1e-4"


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.sh", 'python train_network.py \\\n  --seed 5 $(cat more) "$@"\n'),
        ("t.ps1", "$more = @('--lr', '3')\npython train_network.py --seed 5 @more\n"),
        ("t.bat", "set /p MORE=\r\npython train_network.py --seed 5 %MORE%\r\n"),
    ],
)
def test_what_only_the_shell_knows_is_named_with_its_line(name, text):
    found = read([(name, text)])
    assert found.rows[0].name == "--seed" and found.rows[0].outcome == "unsupported"
    assert any(note.startswith("Not understood: line 2.") for note in found.notes)
