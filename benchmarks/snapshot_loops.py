"""The trainings in whose loops snapshots are measured: FLUX with few of its blocks and random weights, whose LoRA of rank 16 on all
matrices has 100 MB with AdamW's moments. Few pixels and short captions bring a step on a CPU near to one second.

A training is a function `start(tokens, steps, *more)`: the command line, environment and folder of a training with captions of so many
tokens, and the further flags `more`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.checkout import tiny_sd_scripts
from runs.paths import ROOT
from sd_scripts_patches import tiny

RANK = 16
IMAGES = 10
Start = Callable[..., tuple[list[str], dict[str, str], Path]]

DATASET = """\
[general]
caption_extension = ".txt"
[[datasets]]
resolution = 32
batch_size = 1
[[datasets.subsets]]
image_dir = '{images}'
num_repeats = 100
"""
# The width of FLUX.1-dev, which has 19 double and 38 single blocks.
FULL_WIDTH = {
    "num_layers": 1,
    "num_single_layers": 6,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "axes_dims_rope": (16, 56, 56),
}
# Half of it: sd-scripts takes six seconds for a step at the full one, on two cores.
HALF_WIDTH = {"hidden": 1536, "heads": 12, "axes": [16, 56, 56], "mlp": 4.0}
HALF_WIDTH_BLOCKS = {"TINY_BLOCKS": "2,14"}
MAKE_MODEL = """
import json, sys
from pathlib import Path
from trainer import tiny_flux
tiny_flux.TRANSFORMER |= json.loads(sys.argv[2])
tiny_flux.ensure(Path(sys.argv[1]))
"""


def cores() -> dict[str, str]:
    """The environment of a training on all cores and no GPU."""
    return {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "CUDA_VISIBLE_DEVICES": ""}


def built_in(work: Path) -> Start:
    """The built-in trainer."""
    command = [sys.executable, "-c", MAKE_MODEL, str(work / "model"), json.dumps(FULL_WIDTH)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    tiny.write_images(work / "images" / "1_thing", IMAGES)
    (work / "dataset.toml").write_text(DATASET.format(images=work / "images" / "1_thing"), encoding="utf-8")

    def start(tokens: int, steps: int, *more: str) -> tuple[list[str], dict[str, str], Path]:
        flags = {
            "pretrained_model_name_or_path": work / "model",
            "dataset_config": work / "dataset.toml",
            "output_dir": work / "output",
            "network_dim": RANK,
            "optimizer_type": "adamw",
            "learning_rate": 1e-4,
            "t5xxl_max_token_length": tokens,
            "max_data_loader_n_workers": 0,
            "max_train_steps": steps,
        }
        line = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "trainer", "--network_train_unet_only", *line, *more]
        return command, {**os.environ, "PYTHONPATH": str(ROOT), **cores()}, ROOT

    return start


def sd_scripts(work: Path) -> Start:
    """kohya's sd-scripts with the patches."""
    shared = tiny_sd_scripts()
    checkout, installation = shared.checkout, shared.installation

    ours = installation()
    ours.write_site(work)
    (work / "site" / "sitecustomize.py").write_text(tiny.site(tiny.WIDTH | HALF_WIDTH), encoding="utf-8")
    size = HALF_WIDTH_BLOCKS | cores()
    subprocess.run(
        ours.maker(work, IMAGES), env=ours.environment(work, **size), cwd=checkout(), capture_output=True, check=True, timeout=600
    )  # fmt: skip
    (work / "images" / "1_thing").rename(work / "images" / "100_thing")  # sd-scripts repeats each image so often

    def start(tokens: int, steps: int, *more: str) -> tuple[list[str], dict[str, str], Path]:
        changed = {
            "resolution": "32,32",
            "network_dim": str(RANK),
            "learning_rate": "1e-4",
            "t5xxl_max_token_length": str(tokens),
            "max_train_steps": str(steps),
        }
        command = ours.command(*tiny.arguments(work, work / "output", *more, **changed))
        return command, ours.environment(work, **size), checkout()

    return start


def why_not_sd_scripts() -> str:
    """Why sd-scripts cannot be measured here; "" where it can."""
    why_not = tiny_sd_scripts().why_not

    return why_not()
