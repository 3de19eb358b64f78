"""`--split_mode` on the real FLUX trainer: the same LoRA as plain training, half of the model on the device at a time."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import resume_helpers as helpers
import tiny_sd_scripts as tiny

from sd_scripts_patches import split_mode

NO_OFFLOADER = """
def refuse(self, *args, **kwargs):
    raise AssertionError("an Offloader was made")
module.Offloader.__init__ = refuse
"""
LARGEST_SHARE = 0.6
OTHER = {"double": "single", "single": "double"}


@pytest.fixture(scope="module")
def pair(work, tmp_path_factory):
    """Plain training of the single blocks and the same in split mode: in bf16 on an fp8 model, with caches on disk,
    samples and gradient checkpointing. [(folder, log)]"""
    base = tmp_path_factory.mktemp("split")
    flags = ["--max_train_steps", "6", "--fp8_base", "--gradient_checkpointing", "--cache_latents_to_disk"]
    flags += ["--cache_text_encoder_outputs_to_disk", "--network_args", "train_blocks=single"]
    flags += ["--sample_every_n_steps", "3", "--sample_prompts", str(work / "prompts.txt")]

    def run(name):
        out = base / name
        out.mkdir()
        (out / "fault.py").write_text(NO_OFFLOADER)
        changed = {"mixed_precision": "bf16", "train_data_dir": str(tiny.copy_of(work, out))}
        more = ["--split_mode"] if name == "split" else []
        faults = f"library.custom_offloading_utils={out / 'fault.py'}"
        result = helpers.train(work, out, *flags, *more, faults=faults, **changed)
        return out, result.log

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, ("plain", "split")))


def test_losses_lora_and_samples_are_those_of_plain_training(pair):
    """The arithmetic is the same, so the results are identical, not only close."""
    (plain, _), (split, _) = pair
    assert len(tiny.losses(plain / "losses")) == 6
    assert tiny.losses(split / "losses") == tiny.losses(plain / "losses")
    helpers.same_output(plain, split)
    weights = helpers.tensors(plain / "made/tiny.safetensors")
    assert len(weights) == 3 * 12 and all("single_blocks" in name for name in weights)
    assert len(helpers.samples(plain)) == 2


def test_at_most_three_fifths_of_the_parameters_are_on_the_device(pair):
    peak, total = map(int, re.search(r"peak of parameters on cpu: (\d+) of (\d+) bytes", pair[1][1]).groups())
    assert 0.3 < peak / total <= LARGEST_SHARE and "split_mode" not in pair[0][1]


def test_conflicting_arguments_stop_before_a_model_is_loaded(work, tmp_path):
    args = ("--split_mode", "--max_train_steps", "2", "--blocks_to_swap", "2", "--cpu_offload_checkpointing")
    args += ("--network_args", "train_blocks=double", "in_dims=4,4,4,4,4")
    result = helpers.train(work, tmp_path / "out", *args, code=1)
    assert "Building Flux" not in result.log
    for name in ("--blocks_to_swap", "--cpu_offload_checkpointing", "train_blocks=double", "in_dims"):
        assert re.search(rf"^ +{name}", result.log, re.M), name


def test_a_forward_in_another_order_is_incompatible(sd_scripts):
    source = (tiny.checkout() / "library/flux_models.py").read_text(encoding="utf-8")
    assert split_mode._halves_in_order(ast.parse(source)) is None
    swapped = re.sub(r"self\.(double|single)_blocks\)", lambda m: f"self.{OTHER[m[1]]}_blocks)", source)
    assert "in this order" in split_mode._halves_in_order(ast.parse(swapped))
    without = source.replace("self.final_layer", "self.last")
    assert "does not use final_layer" in split_mode._halves_in_order(ast.parse(without))
