"""Configurations of other trainers become runs: every setting has one row, what hangs is dropped, nothing is executed."""

import os

import pytest
from foreign_helpers import imported, row

from runs.files import RunError
from runs.foreign import MAX_FILES, MAX_SCRIPT, read


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
