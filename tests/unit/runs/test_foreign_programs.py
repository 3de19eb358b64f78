"""The files of the kohya_ss GUI and of ai-toolkit become flags of kohya's trainers."""

import json

from foreign_helpers import GUI, example, imported, row

import presets
from runs.foreign_programs import CHECKBOXES
from runs.foreign_programs import GUI as NAMES


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
