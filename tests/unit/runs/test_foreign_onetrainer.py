"""A JSON of OneTrainer as a run: its own values, and those that it uses where the file has none."""

import json

import pytest
from foreign_helpers import imported, row

from runs.files import RunError
from runs.foreign_settings import ImageFolder

PRESET = {"training_method": "LORA", "model_type": "FLUX_DEV_1", "base_model_name": "black-forest-labs/FLUX.1-dev"}


def of(**more):
    return imported(("config.json", json.dumps(PRESET | more)))


def test_a_preset_trains_as_onetrainer_trains_it_without_more():
    one = of(batch_size=4, timestep_distribution="LOGIT_NORMAL", text_encoder={"train": True}, lora_decompose=True)
    wanted = {"model": "flux-dev", "rank": "16", "alpha": "1", "epochs": "100", "batch_size": "4", "resolution": 512}
    assert (wanted | {"learning_rate": "3e-06", "mixed_precision": "fp16"}).items() <= one.fields.items()
    assert "timestep_sampling" not in one.fields["extra"], "its own defaults are not those of kohya's trainers"
    assert one.fields["extra"]["optimizer_type"] == "AdamW" and float(one.fields["extra"]["lr_warmup_steps"]) == 200
    for name in ("timestep_distribution", "text_encoder.train", "lora_decompose"):
        assert row(one, name).outcome == "unsupported"
    assert not one.folders and any("Add the images in step 1" in note for note in one.notes)
    assert of(model_type="CHROMA_1", base_model_name="").fields["model"] == "chroma"
    own_file = {"model_name": "https://huggingface.co/x/y/blob/main/z_image_de_turbo_v1_bf16.safetensors"}
    one = of(model_type="Z_IMAGE", base_model_name="Tongyi-MAI/Z-Image-Turbo", transformer=own_file)
    assert one.fields["model"] == "z-image-de-turbo"
    klein = of(model_type="FLUX_2", base_model_name="black-forest-labs/FLUX.2-klein-base-4B")
    assert klein.fields["model"] == "flux2-klein-4b" and row(klein, "base_model_name").outcome == "field"


def test_an_exported_configuration_brings_its_concepts_samples_and_intervals():
    concepts = [
        {"path": "/data/cats", "balancing": 3.0},
        {"path": "/data/off", "enabled": False},
        {"path": "/data/dogs", "balancing": 50, "balancing_strategy": "SAMPLES"},
        {"path": "/data/held-out", "type": "VALIDATION"},
    ]
    one = of(
        concepts=concepts, samples=[{"prompt": "a\ncat"}, {"prompt": "no", "enabled": False}], resolution="512, 768",
        optimizer={"optimizer": "ADAFACTOR", "relative_step": False, "weight_decay": None},
        transformer={"learning_rate": 2e-4}, learning_rate_scheduler="REX", lora_rank=8, lora_alpha=4.0,
        save_every=250, save_every_unit="STEP", sample_after=10, sample_after_unit="MINUTE",
        output_model_destination="C:\\loras\\cats.safetensors",
    )  # fmt: skip
    assert one.folders == [ImageFolder("/data/cats", 3), ImageFolder("/data/dogs")] and one.prompts == ["a cat"]
    wanted = {"name": "cats", "rank": "8", "alpha": "4", "learning_rate": "0.0002", "resolution": 768, "repeats": 3}
    assert (wanted | {"save_every_n_steps": "250"}).items() <= one.fields.items()
    assert "sample_every_n_steps" not in one.fields and "relative_step=False" in one.fields["extra"]["optimizer_args"]
    assert row(one, "learning_rate_scheduler").value == "REX" and row(one, "concepts.type").value == "/data/held-out"


def test_what_hangproof_does_not_train_is_refused_and_odd_values_are_no_error():
    for more, said in (({"training_method": "FINE_TUNE"}, "trains no LoRA"), ({"model_type": "SANA"}, "no base model")):
        with pytest.raises(RunError, match=said):
            of(**more)
    one = of(peft_type="LOHA", lora_rank=64)
    assert row(one, "peft_type").outcome == "unsupported" and "rank" not in one.fields
    for odd in (None, 7, "x", "9," * 9 + "9" * 5000, [], {}, [None, {"path": 3, "prompt": 4}]):
        keys = ("optimizer", "transformer", "concepts", "samples", "resolution", "lora_rank", "save_every_unit")
        assert of(**dict.fromkeys(keys, odd)).fields["model"] == "flux-dev"
