"""The rendered script of each family trains tiny weights on the real trainer, with its table's flags."""

from pathlib import Path

import pytest
import tiny_families
import tiny_musubi
import tiny_sd_scripts
from runs_helpers import run_script

import presets
import runs
from runs.command import flags
from runs.flags import known_flags

TINY = {  # a model of the tables → the family of tiny weights (tiny_families.py)
    "sdxl": "sdxl",
    "noobai-vpred": "sdxl",
    "sd35-medium": "sd3",
    "chroma": "chroma",
    "anima": "anima",
    "sd15": "sd15",
    "lumina2": "lumina",
    "hunyuan-image": "hunyuan",
}
SMALL = ("tokenizer_cache_dir", "t5_tokenizer_path")  # and every …_max_token_length


def paths(name: str, work: Path) -> dict[str, str]:
    """The flags that name the tiny weights and shorten captions, as extra flags of a run."""
    given = {flag: value.format(work=work) for flag, value in tiny_families.FAMILIES[name].flags.items()}
    given |= {"pretrained_model_name_or_path": f"{work}/model.safetensors", "tokenizer_cache_dir": f"{work}/tokenizers"}
    return {
        flag: value
        for flag, value in given.items()
        if str(work) in value or flag.endswith("_max_token_length") or flag in SMALL
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", list(TINY))
def test_the_rendered_script_of_a_family_trains(tmp_path, monkeypatch, model):
    tiny_sd_scripts.need()
    if reason := tiny_families.why_not(TINY[model]):
        pytest.skip(reason)
    work = tiny_families.workdir(TINY[model])
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    tier = presets.smallest_tier(model, "sd-scripts")
    extra = {**paths(TINY[model], work), "max_token_length": False, "optimizer_type": "Adafactor"}
    extra |= {"optimizer_args": ["relative_step=False", "scale_parameter=False", "warmup_init=False"]}
    known = flags(runs.make({"name": "x", "model": model, "tier": tier}), tmp_path)
    spec = runs.make({
        "name": model, "trigger": "ohwx", "model": model, "tier": tier, "resolution": 64, "mixed_precision": "no", "rank": 4,
        "max_train_steps": 2, "repeats": 1, "save_every_n_steps": 2, "save_every_n_epochs": 0, "sample_every_n_steps": 2,
        "sample_steps": 1, "workers": 0, "extra": {f: v for f, v in extra.items() if v is not False or f in known},
    })  # fmt: skip
    folder = runs.create(spec, work / "images")
    environment = tiny_families.environment(TINY[model], work, HANGPROOF_DATA=str(tmp_path / "data"), TIMEOUT_S="600")
    done = run_script(folder / "train.sh", None, **environment)
    log = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, log[-4000:]
    assert (folder / f"{folder.name}.safetensors").is_file() and (folder / f"{folder.name}-state").is_dir()
    assert len(list((folder / "sample").glob("*.png"))) == 1


MUSUBI = {  # as TINY, for musubi-tuner (tiny_musubi.py); Z-Image is in tests/upstream/test_runs_musubi.py
    "flux2-klein-4b": "flux_2",
    "qwen-image": "qwen_image",
    "wan22-low": "wan",
    "krea2": "krea2",
    "flux-kontext": "flux_kontext",
}
NOT_ON_A_CPU = ("fp8_base", "fp8_scaled", "fp8_text_encoder", "fp8_vl", "fp8_t5", "blocks_to_swap")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", list(MUSUBI))
def test_the_rendered_script_of_a_family_of_musubi_caches_and_trains(tmp_path, monkeypatch, model):
    if reason := tiny_musubi.why_not():
        pytest.skip(reason)
    work = tiny_musubi.workdir(MUSUBI[model])
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    tier = presets.smallest_tier(model, "musubi")
    needs = presets.trainer_of(model, "musubi")["needs"]
    extra = {flag: "tiny" for flag in needs} | {"dit": str(work / "dit.safetensors"), "optimizer_type": "AdamW"}
    extra |= dict.fromkeys(NOT_ON_A_CPU, False)
    precision = "no" if presets.trainer_of(model, "musubi")["precisions"] else "bf16"
    spec = runs.make({
        "name": model, "trigger": "ohwx", "model": model, "tier": tier, "resolution": 64, "mixed_precision": precision, "rank": 4,
        "max_train_steps": 2, "repeats": 1, "save_every_n_steps": 2, "save_every_n_epochs": 0, "workers": 0, "extra": extra,
        "control_dir": str(work / "control") if presets.models()[model]["control"] else "",
    })  # fmt: skip
    known = known_flags("musubi", presets.models()[model]["family"])
    spec = spec.changed(extra={flag: value for flag, value in extra.items() if flag in known})
    folder = runs.create(spec, work / "images")
    environment = tiny_musubi.environment(work, HANGPROOF_DATA=str(tmp_path / "data"), TIMEOUT_S="600")
    done = run_script(folder / "train.sh", None, **environment)
    log = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, log[-4000:]
    assert (folder / f"{folder.name}.safetensors").is_file() and (folder / f"{folder.name}-state").is_dir()
    assert len(list((folder / "cache").glob("*.safetensors"))) == 14
