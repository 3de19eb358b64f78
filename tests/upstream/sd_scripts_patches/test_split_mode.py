"""`--split_mode` and `--fp8_base` on the real FLUX trainer: the same LoRA as plain training, half of the model on the
device at a time, and weights that are cast once: the next start reads the copy."""

import ast
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import resume_helpers as helpers
import tiny_sd_scripts as tiny

from guards import quantized
from sd_scripts_patches import split_mode

NO_OFFLOADER = """
def refuse(self, *args, **kwargs):
    raise AssertionError("an Offloader was made")
module.Offloader.__init__ = refuse
"""
OTHER = {"double": "single", "single": "double"}


@pytest.fixture(scope="module")
def trained(work, tmp_path_factory):
    """Training of the single blocks without our patch of the fp8 model, the same in split mode, and that again: in bf16
    on an fp8 model, with caches on disk, samples and gradient checkpointing. [(folder, log)]"""
    base = tmp_path_factory.mktemp("split")
    weights = Path(shutil.copy(work / "flux.safetensors", base))
    flags = ["--max_train_steps", "6", "--fp8_base", "--gradient_checkpointing", "--cache_latents_to_disk"]
    flags += ["--cache_text_encoder_outputs_to_disk", "--network_args", "train_blocks=single"]
    flags += ["--sample_every_n_steps", "3", "--sample_prompts", str(work / "prompts.txt")]

    def run(name):
        out = base / name
        out.mkdir()
        (out / "fault.py").write_text(NO_OFFLOADER)
        changed = {"mixed_precision": "bf16", "train_data_dir": str(tiny.copy_of(work, out))}
        changed["pretrained_model_name_or_path"] = str(weights)
        more, env = ([], {"HANGPROOF_WITHOUT": "float8"}) if name == "plain" else (["--split_mode"], {})
        faults = f"library.custom_offloading_utils={out / 'fault.py'}"
        result = helpers.train(work, out, *flags, *more, faults=faults, env=env, **changed)
        return out, result.log

    with ThreadPoolExecutor(2) as pool:
        first = list(pool.map(run, ("plain", "split")))
    (copy,) = (base / quantized.FOLDER).iterdir()
    written = copy.stat().st_mtime_ns
    found = [*first, run("again")]
    assert [*(base / quantized.FOLDER).iterdir()] == [copy] and copy.stat().st_mtime_ns == written
    return found


def test_losses_lora_and_samples_are_those_of_plain_training_with_three_fifths_of_the_model_at_a_time(trained):
    """The arithmetic is the same, so the results are identical, not only close."""
    (plain, log), *others = trained
    assert len(tiny.losses(plain / "losses")) == 6 and "Loaded fp8 FLUX model" not in log
    for other, log in others:
        assert tiny.losses(other / "losses") == tiny.losses(plain / "losses") and "Loaded fp8 FLUX model" in log
        helpers.same_output(plain, other)
        peak, total = map(int, re.search(r"peak of parameters on cpu: (\d+) of (\d+) bytes", log).groups())
        assert 0.3 < peak / total <= 0.6
    weights = helpers.tensors(plain / "made/tiny.safetensors")
    assert len(weights) == 3 * 12 and all("single_blocks" in name for name in weights)
    assert len(helpers.samples(plain)) == 2


def test_a_forward_in_another_order_is_incompatible(sd_scripts):
    source = (tiny.checkout() / "library/flux_models.py").read_text(encoding="utf-8")
    assert split_mode._halves_in_order(ast.parse(source)) is None
    swapped = re.sub(r"self\.(double|single)_blocks\)", lambda m: f"self.{OTHER[m[1]]}_blocks)", source)
    assert "in this order" in split_mode._halves_in_order(ast.parse(swapped))
    without = source.replace("self.final_layer", "self.last")
    assert "does not use final_layer" in split_mode._halves_in_order(ast.parse(without))
