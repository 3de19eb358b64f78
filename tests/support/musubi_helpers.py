"""Train, kill and resume runs of musubi-tuner."""

from __future__ import annotations

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


def train(
    folder, *more: str, family=tiny.Z_IMAGE, patched=True, die_after=0, env=(), **changed: str
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
    return helpers.watch(command, tiny.environment(work, patched, **settings), tiny.checkout(), 400)
