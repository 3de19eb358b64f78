"""FLUX.1 and SDXL train as diffusers' own example scripts do."""

import json
import os
import subprocess
import sys

import pytest
import tiny_pipelines

from runs.paths import ROOT


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_the_losses_are_those_of_diffusers_example_script(family, tmp_path):
    checkout = os.environ.get("DIFFUSERS_DIR")
    if not checkout:
        pytest.skip("no checkout of diffusers (DIFFUSERS_DIR), which has the example scripts")
    flags = ["--checkout", checkout, "--family", family, "--steps", "20", "--rounds", "1", "--json"]
    if family == "sdxl":
        flags += ["--model", str(tiny_pipelines.make("StableDiffusionXLPipeline", tmp_path / "model"))]
    command = [sys.executable, "-m", "benchmarks", "examples", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]  # 1: its step took longer here
    found = json.loads(done.stdout)
    assert len(found["losses"]) == 20
    assert found["largest_relative_difference"] <= 1e-5
