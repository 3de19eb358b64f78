"""The scripts that are rendered run unchanged on the real sd-scripts, on toy weights, through the guarded launcher."""

from pathlib import Path

import pytest
import tiny_sd_scripts
from runs_helpers import data, pictures, run_script, spec  # noqa: F401

import runs


@pytest.mark.parametrize("tier", ["12G", "16G", "20G"])
@pytest.mark.timeout(300)
def test_a_rendered_script_trains(tmp_path, data, tier):  # noqa: F811
    tiny_sd_scripts.need()
    work = tiny_sd_scripts.workdir()
    paths = {flag: str(work / f"{name}.safetensors") for flag, name in (
        ("pretrained_model_name_or_path", "flux"), ("clip_l", "clip_l"), ("t5xxl", "t5xxl"), ("ae", "ae"))}  # fmt: skip
    made = spec(
        name="tiny it's", backend="sd-scripts", tier=tier, resolution=64, max_train_steps=4, save_every_n_steps=2,
        prompts=["a thing"], sample_every_n_steps=4, sample_steps=1,
        extra={**paths, "tokenizer_cache_dir": str(work / "tokenizers"), "t5xxl_max_token_length": 32},
    )  # fmt: skip
    assert runs.problems(made)[-1].startswith("no images"), "files, launcher and checkout are all there"
    folder = runs.create(made, pictures(tmp_path / "in", 2))
    assert runs.problems(runs.load(folder)) == []
    environment = tiny_sd_scripts.environment(work)
    done = run_script(folder / "train.sh", None, **environment, TIMEOUT_S="240")
    log = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, log[-4000:]
    assert {p.name for p in folder.glob("*.safetensors")} >= {
        "tiny-it-s.safetensors",
        "tiny-it-s-step00000002.safetensors",
    }
    assert (folder / "tiny-it-s-step00000002-state").is_dir() and (folder / "tiny-it-s-state").is_dir()
    assert len(list((folder / "sample").glob("*.png"))) == 1
    assert "Block swap enabled" not in log and ("split" in log.lower() or tier != "12G")
    assert all(Path(p).with_suffix(".txt").is_file() for p in runs.images_in(data / "datasets/tiny-it-s"))
