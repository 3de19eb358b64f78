"""`--fp8_base` of sd-scripts casts its model once: the next start reads the copy, and trains the same to the digit."""

import resume_helpers as helpers
import tiny_sd_scripts as tiny

from guards import quantized


def copies(folder):
    return sorted((folder / quantized.FOLDER).glob("*"))


def test_real_training_is_the_same_with_the_copy_and_without_the_patch(work, tmp_path):
    weights = tmp_path / "flux.safetensors"
    weights.write_bytes((work / "flux.safetensors").read_bytes())

    def train(name, env=()):
        out = tmp_path / name
        out.mkdir()
        changed = {"mixed_precision": "bf16", "pretrained_model_name_or_path": str(weights)}
        result = helpers.train(work, out, "--max_train_steps", "3", "--fp8_base", env=env, **changed)
        return tiny.losses(out / "losses"), "Loaded fp8 FLUX model" in result.log

    plain, loaded = train("plain", {"HANGPROOF_WITHOUT": "float8"})
    assert not loaded and copies(tmp_path) == []
    assert train("first") == (plain, True)
    (copy,) = copies(tmp_path)
    written = copy.stat().st_mtime_ns
    assert train("second") == (plain, True)
    assert copies(tmp_path) == [copy] and copy.stat().st_mtime_ns == written
