"""Configurations of other trainers become runs: a row for each setting, what hangs is dropped, nothing is executed."""

import json
import os
import time

import pytest
from foreign_helpers import GUI, example, imported, row

import presets
import runs
from runs import foreign
from runs.files import RunError
from runs.foreign import CHECKBOXES, MAX_FILES, MAX_SCRIPT, read


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
    command = "accelerate launch src/musubi_tuner/zimage_train_network.py --dit x/z_image.sft --network_dim 32"
    one = imported(("", command))
    assert (one.fields["model"], one.fields["backend"], one.fields["rank"]) == ("z-image", "musubi", "32")
    assert one.kind == "a command of musubi-tuner"
    assert imported(("t.sh", f"{command}\n{command}")).notes[0].startswith("t.sh has 2 training commands; the first")


def test_prompts_with_options_are_prompts_and_a_value_of_0_is_one():
    script = "accelerate launch -m trainer --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev --network_dim 8"
    data = "[general]\nkeep_tokens = 0\n[[datasets]]\nresolution = 768\n[[datasets.subsets]]\nimage_dir = '/x'\n"
    prompts = "# a comment\na cat --n bad --w 512\n #two --d 1\n"
    for named, name in ((" --sample_prompts /o/mine.txt", "mine.txt"), ("", "sample_prompts.txt")):
        files = [(name, prompts), ("dataset.toml", data), ("train.sh", f"{script}{named}\n")]
        for order in (files, files[::-1]):
            one = imported(*order)
            assert (one.kind, one.fields["backend"], one.fields["rank"]) == ("a script of Hangproof", "diffusers", "8")
            assert one.prompts == ["a cat --n bad --w 512", "#two --d 1"] and one.fields["keep_tokens"] == "0"
    many = imported(("sample_prompts.txt", f"{'a' * 2000}\n" * 200), ("train.sh", script)).prompts
    assert many == ["a" * 1000] * 100


def test_what_cannot_be_imported_says_why():
    for text, words in (
        ("hello there", "this is not a train.sh"),
        ('{"a": 1}', "none of kohya_ss"),
        ('{"--model_type": "lora", "--lora_rank": 16}', "Enter its values in step 2 by hand"),  # of SimpleTuner
        ('{"train_data_dir": "x"}', "trains no LoRA. Save it on the LoRA tab"),
        ('{"LoRA_type": "Standard", "v2": true}', "Stable Diffusion 2"),
        ("[[datasets]\n", "not valid TOML"),
        ("config: {process: [{network: {}, model: {is_pixart: true}}]}", "of the kind pixart"),
        ("config: {process: [{model: {is_flux: true}}]}", "trains no LoRA"),
        ("python wan_train_network.py --dit wan2.1.safetensors --task t2v-1.3B --network_dim 4", "or for its --task"),
        (runs.dumps(runs.make({"name": "cat"})), "Choose the train.sh and dataset.toml beside it"),
        ("x" * (MAX_SCRIPT + 1), "larger than"),
        ('{"LoRA_type": ' + "[" * 20000, "nested too deeply"),
        ("a" + ".a" * 100_000 + " = 1", "nested too deeply"),  # it took tomllib all memory
        ('"a b".' * 9000 + "a = 1", "nested too deeply"),
        ("config: " + "[" * 60_000, "nested too deeply"),  # and PyYAML minutes
        ('{"LoRA_type": "\\ud800"}', "not valid JSON"),  # half a character, which no answer can hold
        (f"config: {{process: 0x{'f' * 5000}}}", "not valid YAML"),  # nor such a number
        ("a=x\n" + "a=$a$a\n" * 24 + "python flux_train_network.py --x $a", "more than 1,000,000 characters"),
    ):
        with pytest.raises(RunError) as error:
            imported(("", text))
        assert words in str(error.value)
    began_s = time.process_time()
    read([("", json.dumps({**GUI, "additional_parameters": "--a " * 200_000}))])  # as long as a script may be
    assert time.process_time() - began_s < 20
    script, job, gui = "python flux_train_network.py --network_dim 4", example("ai_toolkit.yaml"), json.dumps(GUI)
    for one, other in ((script, job), (job, script), (gui, script), (job, gui)):  # else a run has settings of both
        with pytest.raises(RunError, match="one at a time"):
            imported(("", one), ("other", other))
    with pytest.raises(RunError, match="too many"):
        read([("x", "y")] * (MAX_FILES + 1))


@pytest.mark.parametrize("repeated", ["[x, x]", "{x: 1, y: 2}"])
def test_references_of_yaml_that_multiply_are_refused(repeated):
    lines = [f"a0: &a0 {repeated}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    for kind in ("*a11", "x"):
        with pytest.raises(RunError, match=r"has references, such as \*name"):
            imported(("", "\n".join([*lines, f"config: {{process: [{{type: {kind}}}]}}"])))


def test_a_file_of_somebody_else_names_no_store_no_repository_no_file_to_write_and_no_variable_but_a_secret(tmp_path):
    (own := tmp_path / ".bashrc").touch()
    machines = "--store s3://theirs/x --spend_limit 1 --gpus 7 --nodes 9 --save_dir /x --environment x"
    variables = "export LD_PRELOAD=/tmp/hf_AAAAAAAAAAAAAAAAAAAA.so HF_TOKEN=hf_BBBBBBBBBBBBBBBBBBBB\n"
    hub = "--huggingface_repo_id theirs/x --save_state_to_huggingface --resume_from_huggingface"
    files = f"--console_log_file {own} --log_prefix ../../x"
    code = "--optimizer_type torch.save --lr_scheduler_args f='/x' --lr_scheduler_type torch.save --dataset_class os.path.X"
    command = f"python flux_train_network.py --network_dim 4 {files} {machines} {hub} {code}"
    one = imported(("t.sh", variables + command))
    assert one.fields.pop("environment") == {"HF_TOKEN": "hf_BBBBBBBBBBBBBBBBBBBB"}, "by its name"
    assert not {"store", "spend_limit", "gpus", "nodes", "save_dir", "environment"} & one.fields.keys()
    assert {row(one, name).outcome for name in ("store", "nodes", "save_dir", "environment")} == {"unsupported"}
    assert row(one, "console_log_file").outcome == row(one, "log_prefix").outcome == "run"
    assert row(one, "huggingface_repo_id").outcome == "unsupported"
    assert not [name for name in one.fields["extra"] if name.endswith(("_file", "_prefix")) or "huggingface" in name]
    named = {part.split()[0] for part in code.split("--")[1:]}
    assert {row(one, name).outcome for name in named} == {"unsupported"} and not named & one.fields["extra"].keys()
    known = imported(("t.sh", f"{command} --optimizer_type prodigyopt.Prodigy --optimizer_args d_coef=2"))
    assert known.fields["extra"]["optimizer_type"] == "prodigyopt.Prodigy"


def test_nothing_of_an_imported_script_is_executed(tmp_path, monkeypatch):
    flag = tmp_path / "executed"
    monkeypatch.setattr(os, "system", lambda *_: flag.touch())
    text = f"touch {flag}\nX=$(touch {flag})\naccelerate launch `touch {flag}` flux_train_network.py "
    text += f'--network_dim $(touch {flag}; echo 4) --learning_rate 1e-4 --output_name "$(touch {flag})" --x ";touch {flag}"'
    one = imported(("train.sh", text))
    assert not flag.exists()
    assert row(one, "network_dim").outcome == "unsupported" and one.fields["learning_rate"] == "1e-4"


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
    assert row(one, "xformers").outcome == "changed" and one.folders[0].path == "/data/cats"
    secret = row(one, "wandb_api_key")
    assert secret.outcome == "changed" and "kept apart" in secret.text and "sk-very" not in str(one.rows)
    assert one.fields["environment"] == {"WANDB_API_KEY": "sk-very-secret"}
    assert "wandb_api_key" not in one.fields["extra"]
    gui = {"LoRA_type": "Kohya LoCon", "conv_dim": 8, "multi_gpu": True, "num_processes": 2}
    gui |= {"unet_lr": 1e-4, "lr_warmup": 5}
    one = imported(("x.json", json.dumps(gui)))
    assert one.fields["gpus"] == 2 and "conv_dim=8" in one.fields["extra"]["network_args"]
    assert str(one.fields["extra"]["lr_warmup_steps"]) == "0.05"
    assert "gpus" not in imported(("x.json", json.dumps({**gui, "multi_gpu": False}))).fields
    gui = {"LoRA_type": "Standard", "max_train_epochs": 12, "max_train_steps": 1600, "epoch": 1}
    one = imported(("x.json", json.dumps(gui)))  # 1600 is the GUI's default, and it passes both on
    assert (one.fields["epochs"], one.fields["max_train_steps"]) == ("12", None)


def test_each_checkbox_of_the_gui_is_a_family_and_each_type_of_lora_is_taken_over_or_refused_with_a_reason():
    for box in (*CHECKBOXES, ""):
        gui = {"LoRA_type": "Standard", "network_dim": 8, "learning_rate": 1e-4, **({box: True} if box else {})}
        found = presets.trainer_of(imported(("x.json", json.dumps(gui))).fields["model"], "sd-scripts")
        assert found["script"] == CHECKBOXES.get(box, "train_network.py")
    for kind in (*foreign.GUI["networks"], "LyCORIS/LoHa", "", None, 7):
        gui = {"LoRA_type": kind, "network_dim": 128, "network_alpha": 1, "conv_dim": 8, "sdxl": True, "factor": -1}
        one = imported(("x.json", json.dumps(gui)))
        assert one.fields.get("rank") == ("128" if kind in foreign.GUI["networks"] else None)
        assert kind in foreign.GUI["networks"] or "lycoris-lora" in row(one, "LoRA_type").text


def test_a_job_of_ai_toolkit_gives_its_length_prompts_and_resolution():
    one = imported(("job.yaml", example("ai_toolkit.yaml")))
    wanted = {"model": "flux-dev", "rank": "16", "max_train_steps": "2000", "resolution": 1024, "trigger": "p3r5on"}
    assert (wanted | {"learning_rate": "1e-4", "prompts": ["a cat", "a dog"]}).items() <= one.fields.items()
    assert row(one, "train.ema_config").outcome == row(one, "datasets.shuffle_tokens").outcome == "unsupported"
    assert row(one, "datasets.is_reg").value == "/path/to/others" and len(one.folders) == 1
    job = "{trigger_word: p3r5on, network: {rank: 8}, model: {is_flux: true, name_or_path: a/b}, sample: {prompts: ['a [trigger] b']}}"
    one = imported(("", f"config: {{process: [{job}]}}"))
    assert one.prompts == ["a p3r5on b"], "as ai-toolkit fills it in"
    assert (one.fields["model"], one.fields["rank"]) == ("flux-dev", "8"), "a file of one's own is no Chroma"
    job = "{network: {}, model: {arch: flux_kontext}, datasets: [{control_path: /c}], sample: {sample_steps: 9}, save: {max_step_saves_to_keep: 4}}"
    one = imported(("", f"config: {{process: [{job}]}}"))
    wanted = {"model": "flux-kontext", "control_dir": "/c", "sample_steps": "9"}
    assert wanted.items() <= one.fields.items()
    for arch, model in (
        ("is_v3: true", "sd35-large"), ("arch: chroma", "chroma"), ("", "sd15"), ("arch: sd15", "sd15"),
        ("arch: anima", "anima"), ("arch: krea2", "krea2"), ("arch: flux2", "flux2-dev"),
        ("arch: flux2_klein_4b", "flux2-klein-4b"), ("arch: flux2_klein_9b, name_or_path: a/b", "flux2-klein-9b"),
        ("arch: zimage", "z-image"), ("arch: 'zimage:deturbo', name_or_path: ostris/Z-Image-De-Turbo", "z-image-de-turbo"),
        ("arch: 'zimage:turbo', name_or_path: Tongyi-MAI/Z-Image-Turbo", "z-image-turbo"),
    ):  # fmt: skip
        text = f"config: {{process: [{{network: {{}}, model: {{{arch}}}}}]}}"
        assert imported(("", text)).fields["model"] == model


def test_a_command_overrides_its_config_file_and_what_is_in_other_files_is_asked_for():
    script = "torchrun --nproc_per_node 2 train_network.py --config_file z.toml --dataset_config d.toml --network_dim 8"
    files = [("train.sh", script), ("z.toml", "[a]\nnetwork_dim = 64\nlearning_rate = 5e-4\n")]
    for order in (files, files[::-1]):
        one = imported(*order)
        assert (one.fields["rank"], one.fields["learning_rate"], one.fields["gpus"]) == ("8", "0.0005", 2)
        assert row(one, "config_file").outcome == "run" and row(one, "dataset_config").outcome == "unsupported"
    for odd in ("³", "9" * 5000, "0"):
        assert "gpus" not in imported(("t.sh", script.replace("node 2", f"node {odd}"))).fields
