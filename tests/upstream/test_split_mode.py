"""`--split_mode` on the real FLUX trainer: the same LoRA as plain training, half of the model on the device at a time."""

import ast
import re
import subprocess
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
ONLY_SINGLE = ("--network_args", "train_blocks=single")
LARGEST_SHARE = 0.6


@pytest.fixture(scope="module")
def pairs(work, tmp_path_factory):
    """Plain training of the single blocks and the same in split mode: 20 steps in fp32; 4 in bf16 on an fp8 model, with
    caches on disk, samples and gradient checkpointing."""
    base = tmp_path_factory.mktemp("split")
    cases = {
        "fp32": ["--max_train_steps", "20"],
        "fp8": ["--max_train_steps", "4", "--fp8_base", "--gradient_checkpointing"],
    }
    cases["fp8"] += ["--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk"]
    cases["fp8"] += ["--sample_every_n_steps", "2", "--sample_prompts", str(work / "prompts.txt")]

    def run(name, more):
        out = base / f"{name}-{'split' if more else 'plain'}"
        out.mkdir()
        (out / "fault.py").write_text(NO_OFFLOADER)
        changed = {"mixed_precision": "bf16", "train_data_dir": str(tiny.copy_of(work, out))} if name == "fp8" else {}
        faults = f"library.custom_offloading_utils={out / 'fault.py'}"
        result = helpers.train(work, out, *cases[name], *ONLY_SINGLE, *more, faults=faults, **changed)
        assert result.code == 0, result.log[-3000:]
        return out, result.log

    with ThreadPoolExecutor(2) as pool:
        jobs = {name: [pool.submit(run, name, more) for more in ([], ["--split_mode"])] for name in cases}
        return {name: [job.result() for job in pair] for name, pair in jobs.items()}


@pytest.mark.parametrize(("case", "steps"), [("fp32", 20), ("fp8", 4)])
def test_losses_and_lora_are_those_of_plain_training(pairs, case, steps):
    """The arithmetic is the same, so the results are identical, not only close."""
    (plain, _), (split, _) = pairs[case]
    assert len(tiny.losses(plain / "losses")) == steps
    assert tiny.losses(split / "losses") == tiny.losses(plain / "losses")
    weights = helpers.tensors(plain / "made/tiny.safetensors")
    assert len(weights) == 3 * 12 and all("single_blocks" in name for name in weights)
    assert helpers.tensors(split / "made/tiny.safetensors") == weights


@pytest.mark.parametrize("case", ["fp32", "fp8"])
def test_at_most_three_fifths_of_the_parameters_are_on_the_device(pairs, case):
    log = pairs[case][1][1]
    peak, total = map(int, re.search(r"peak of parameters on cpu: (\d+) of (\d+) bytes", log).groups())
    assert 0.3 < peak / total <= LARGEST_SHARE
    assert "split_mode" not in pairs[case][0][1]


def test_samples_are_those_of_plain_training(pairs):
    pictures = [sorted(p.read_bytes() for p in (out / "made/sample").glob("*.png")) for out, _ in pairs["fp8"]]
    assert len(pictures[0]) == 2 and pictures[0] == pictures[1]


def test_the_larger_half_of_the_real_flux_is_less_than_three_fifths(work):
    """FLUX.1-dev at its real size, without weights: 19 double blocks, 38 single blocks."""
    source = (
        f"import sys\nsys.path[:0] = [{str(tiny.ROOT)!r}, {str(work / 'site')!r}]\n"  # a stand-in for torchvision
        "import torch\nfrom library import flux_models\nfrom sd_scripts_patches.split_mode import Halves\n"
        "with torch.device('meta'):\n    model = flux_models.Flux(flux_models.configs['dev'].params)\n"
        "halves = Halves(model, torch.device('cpu'))\n"
        "print(halves.bytes['first'] // 4, halves.bytes['second'] // 4)\n"
    )
    env = {**tiny.environment(work), "PYTHONPATH": ""}
    done = subprocess.run(
        [str(tiny.python()), "-c", source], env=env, cwd=tiny.checkout(), check=True, stdout=subprocess.PIPE, text=True, timeout=240
    )  # fmt: skip
    first, second = map(int, done.stdout.split()[-2:])
    assert 11.8e9 < first + second < 12.0e9
    assert max(first, second) / (first + second) <= LARGEST_SHARE
    assert 6.4e9 < first < 6.6e9


def test_conflicting_arguments_stop_before_a_model_is_loaded(work, tmp_path):
    args = ("--split_mode", "--max_train_steps", "2", "--blocks_to_swap", "2", "--cpu_offload_checkpointing")
    result = helpers.train(work, tmp_path / "out", *args, "--network_args", "train_blocks=double", "in_dims=4,4,4,4,4")
    assert result.code == 1 and "Building Flux" not in result.log
    for name in ("--blocks_to_swap", "--cpu_offload_checkpointing", "train_blocks=double", "in_dims"):
        assert re.search(rf"^ +{name}", result.log, re.M), name


def test_a_forward_in_another_order_is_incompatible(sd_scripts):
    source = (tiny.checkout() / "library/flux_models.py").read_text(encoding="utf-8")
    assert split_mode._halves_in_order(ast.parse(source)) is None
    swapped = (
        source.replace("self.double_blocks)", "self.X)")
        .replace("self.single_blocks)", "self.double_blocks)")
        .replace("self.X)", "self.single_blocks)")
    )
    assert "in this order" in split_mode._halves_in_order(ast.parse(swapped))
    assert "does not use final_layer" in split_mode._halves_in_order(
        ast.parse(source.replace("self.final_layer", "self.last"))
    )
