"""The shape of FLUX in the tables is that of the real model."""

import json
import subprocess

import pytest
import tiny_sd_scripts

import presets

SHAPE = """
import dataclasses, json, sys
sys.path[:0] = [sys.argv[1]]
import torch
from library import flux_models
with torch.device("meta"):
    flux = flux_models.Flux(flux_models.FluxParams(
        in_channels=64, vec_in_dim=768, context_in_dim=4096, hidden_size=3072, mlp_ratio=4.0, num_heads=24, depth=19,
        depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10_000, qkv_bias=True, guidance_embed=True))
def count(module): return sum(p.numel() for p in module.parameters())
def sides(module): return sum(m.in_features + m.out_features for m in module.modules() if isinstance(m, torch.nn.Linear))
d, s = flux.double_blocks[0], flux.single_blocks[0]
print(json.dumps({"double_parameters": count(d), "single_parameters": count(s), "double_lora_sides": sides(d),
    "single_lora_sides": sides(s), "other_parameters": count(flux) - 19 * count(d) - 38 * count(s)}))
"""


def test_the_shape_is_that_of_the_real_model(newest, tmp_path):
    tiny_sd_scripts.write_site(tmp_path)
    environment = tiny_sd_scripts.environment(tmp_path, TINY_BLOCKS="2,4")
    done = subprocess.run(
        [tiny_sd_scripts.python(), "-c", SHAPE, str(tiny_sd_scripts.checkout())], capture_output=True, text=True, timeout=300,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]
    table = presets.families()["flux"]["shape"]
    for name, real in json.loads(done.stdout.splitlines()[-1]).items():
        assert table[name] == pytest.approx(real, rel=0.02), name
