"""Saves are atomic, old files are deleted only while a newer one verifies, and no tracker comes before the last save.

As for sd-scripts. musubi-tuner also deletes old LoRAs itself, in its training loop.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

from guards import checkpoint
from sd_scripts_patches import ast_utils, save, session
from sd_scripts_patches.musubi import BASE, LOOP, TRAIN_UTILS
from sd_scripts_patches.patch import Patch, Target, find_function
from sd_scripts_patches.save import end_training as end_training


def save_weights(network: Any, file: str, dtype: Any, metadata: dict[str, str] | None) -> None:
    """`network.save_weights(file, …)`, atomically, in phase "save"."""
    with session.phase("save", note=file):
        save.save_weights(network, file, dtype, metadata)


def remove_weights(file: str) -> None:
    """Delete an old LoRA file, unless no newer one of its folder verifies. A failure does not end the run."""
    old = Path(file)
    try:
        age = old.stat().st_mtime_ns
        newer = [p for p in old.parent.glob("*.safetensors") if p != old and p.stat().st_mtime_ns >= age]
        newer.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        if any(checkpoint.verify_lora(path).usable for path in newer):
            os.remove(old)
        else:
            session.log(f"{old} is kept: no newer file verifies, so it is the last valid one")
    except OSError as error:
        session.log(f"{old} was not deleted ({error}); delete it by hand")


def rewrite(tree: ast.Module) -> ast.Module:
    """Rewrite the training loop."""
    tree = save.rewrite_loop(tree, LOOP, "sd_scripts_patches.musubi.save")
    remove = ast_utils.find_statement(find_function(tree, LOOP), ast.Expr, "os.remove(old_ckpt_file)")
    remove.value = ast_utils.parse_expression("_hangproof_remove(old_ckpt_file)")
    ast_utils.insert_import(tree, "from sd_scripts_patches.musubi.save import remove_weights as _hangproof_remove")
    return tree


PATCH = Patch(
    name="save",
    why=save.PATCH.why,
    targets=(
        Target(BASE, "NetworkTrainer.train", params=("self", "args"), make=save._sweep_first),
        Target(save.ACCELERATOR, "Accelerator.save_state", params=("self", "output_dir"), make=save._write_aside),
        Target(TRAIN_UTILS, "save_and_remove_state_stepwise", params=("args", "accelerator", "step_no")),
        Target(TRAIN_UTILS, "save_and_remove_state_on_epoch_end", params=("args", "accelerator", "epoch_no")),
        Target(TRAIN_UTILS, "save_state_on_train_end", params=("args", "accelerator")),
        Target(TRAIN_UTILS, "shutil", beside="save_and_remove_state_stepwise", make=lambda _: save.SafeDeletion()),
    ),
    rewrites=((Target(BASE, LOOP, params=("self", "args", "accelerator")), rewrite),),
)
