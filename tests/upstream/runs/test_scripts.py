"""The scripts that are rendered run unchanged on kohya's real trainers, on tiny weights, through the guarded launcher.

tests/campaigns has musubi-tuner's: of every family in test_runs_families.py, with kills in each command in faults.toml.
"""

import pytest
import resume_helpers
import tiny_sd_scripts
from runs_helpers import pictures, run_script, spec

import runs


@pytest.mark.parametrize("tier", [pytest.param("12G", marks=pytest.mark.journey), "16G", "20G"])
def test_a_rendered_script_trains(tier, newest, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    work = tiny_sd_scripts.workdir()
    named = {"pretrained_model_name_or_path": "flux", "clip_l": "clip_l", "t5xxl": "t5xxl", "ae": "ae"}
    paths = {flag: str(work / f"{name}.safetensors") for flag, name in named.items()}
    if tier == "20G":  # its own optimizer needs bitsandbytes
        paths["optimizer_type"] = "AdamW"
    wanted = spec(
        name=f"tiny it's {tier}", backend="sd-scripts", tier=tier, resolution=64, max_train_steps=4,
        save_every_n_steps=2, prompts=["a thing"], sample_every_n_steps=4, sample_steps=1,
        extra={**paths, "tokenizer_cache_dir": str(work / "tokenizers"), "t5xxl_max_token_length": 32},
    )  # fmt: skip
    assert runs.problems(wanted)[-1].message.startswith("no images"), "files, launcher and checkout are all there"
    folder = runs.create(wanted, pictures(tmp_path / "in", 2))
    assert runs.problems(runs.load(folder)) == []
    environment = tiny_sd_scripts.environment(work, HANGPROOF_DATA=str(tmp_path / "data"), TIMEOUT_S="400")
    done = run_script(folder / "train.sh", None, **environment)
    slug, log = folder.name, (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, log[-4000:]
    for name in (slug, f"{slug}-step00000002"):
        assert (folder / f"{name}.safetensors").is_file() and (folder / f"{name}-state").is_dir()
    assert len(list((folder / "sample").glob("*.png"))) == 1
    assert "Block swap enabled" not in log and ("split" in log.lower() or tier != "12G")
    keys = resume_helpers.tensors(folder / f"{slug}.safetensors")
    assert any("single_blocks" in key for key in keys)
    assert any("double_blocks" in key for key in keys) == (tier != "12G")
