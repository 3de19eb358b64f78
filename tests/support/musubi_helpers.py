"""Train, kill and resume runs of musubi-tuner."""

from __future__ import annotations

from pathlib import Path

import patches_helpers as helpers
import resume_helpers
import tiny_musubi as tiny

MODELS_TOML = """
[models.toy-z]
name = "Toy Z"
family = "z-image"
[models.toy-z.files]
dit = "{weights}"
vae = "{weights}"
text_encoder = "{weights}"
"""
"""models.toml of a tiny model, for runs that the project makes."""
SORTED = """
import glob, types
module.glob = types.SimpleNamespace(glob=lambda pattern: sorted(glob.glob(pattern)))
"""
"""musubi-tuner alone trains in the order of the folder's entries, which differs between two copies."""
HALF = """
import os, signal
name = "save_file" if hasattr(module, "save_file") else "mem_eff_save_file"
left, save = [int(os.environ["DIE_AFTER"])], getattr(module, name)
def half(tensors, filename, *args, **kwargs):
    save(tensors, filename, *args, **kwargs)
    left[0] -= 1
    if not left[0]:
        os.truncate(filename, os.path.getsize(filename) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
setattr(module, name, half)
"""
SAVERS = ("dataset.cache_io", "utils.safetensors_utils")  # of latents, of text
"""SIGKILL when half of that many-th cache file is written."""


def train(
    folder: Path,
    *more: str,
    family: str = tiny.Z_IMAGE,
    patched: bool = True,
    die_after: int = 0,
    timeout_s: float = 400,
    env=(),
    **changed: str,
) -> helpers.RunResult:
    """Run one training process in `folder`, which holds dataset.toml, caches, and output, losses and metrics of all attempts."""
    work = tiny.workdir(family)
    settings = {"TINY_LOSSES": str(folder / "losses"), "HANGPROOF_RUN": str(folder), **dict(env)}
    if die_after:
        (folder / "die.py").write_text(resume_helpers.DIE)
        settings |= {"DIE_AFTER": str(die_after), "TINY_FAULTS": f"musubi_tuner.utils.train_utils={folder / 'die.py'}"}
    if not patched:
        (folder / "sorted.py").write_text(SORTED)
        settings["TINY_FAULTS"] = f"musubi_tuner.dataset.image_video_dataset={folder / 'sorted.py'}"
    line = tiny.arguments(work, folder / "dataset.toml", folder / "made", *more, family=family, **changed)
    command = tiny.command(tiny.trainer(family), *line, patched=patched)
    return helpers.watch(command, tiny.environment(work, patched, **settings), tiny.checkout(), timeout_s)


def killed_and_resumed(folder: Path, *more: str, kills: int, seed: int, family: str = tiny.Z_IMAGE) -> int:
    """Kill a run as `resume_helpers.until_done` does. Returns how often it was killed."""

    def run(die_after: int, *resume: str) -> helpers.RunResult:
        return train(folder, *more, *resume, die_after=die_after, family=family)

    return resume_helpers.until_done(run, folder / "made", kills, seed)


def cache(folder: Path, script: str, *more: str, die_after: int = 0, family: str = tiny.Z_IMAGE) -> helpers.RunResult:
    """Run one caching command on the data set in `folder`."""
    settings = {}
    if die_after:
        (folder / "half.py").write_text(HALF)
        faults = ";".join(f"musubi_tuner.{module}={folder / 'half.py'}" for module in SAVERS)
        settings = {"DIE_AFTER": str(die_after), "TINY_FAULTS": faults}
    line = tiny.caching(folder / "dataset.toml", *more, family=family)[script]
    env = tiny.environment(tiny.workdir(family), **settings)
    return helpers.watch(tiny.command(script, *line), env, tiny.checkout(), 200)
