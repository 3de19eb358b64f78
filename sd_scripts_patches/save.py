"""A save is whole or it is not there; nothing older goes before the new one stands; the last one waits for nobody.

accelerate writes a state file by file into its final folder, and a LoRA is written in place: a kill in between leaves
what looks like a checkpoint. Here each state is made in a folder beside its place, synced, hashed and renamed
(guards.checkpoint), each LoRA likewise as a file; what a killed process left half-written is swept away when the next one
begins. sd-scripts deletes old states after that call has returned, by its own count; each goes only while another one
verifies on the disk, and a deletion that fails cannot end the run. Weights that hold NaN are refused: they would
overwrite, in turn, every state that could still be resumed.

At its end `train()` closes the trackers first and saves afterwards (a tracker that hangs loses both the last state and
the LoRA); that one statement is moved behind the saves.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from sd_scripts_patches import session, trees
from sd_scripts_patches.patch import DoesNotFit, Patch, Target, find_function, wrap

MODULE = "train_network"
UTIL = "library.train_util"
ACCELERATOR = "accelerate.accelerator"
SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Distributed types where every rank writes its part of a state: one rank cannot make the folder for all."""
_NUMBERS = re.compile(r"-step(?P<step>\d{8})-state$|-(?P<epoch>\d{6})-state$")


class NotSaved(RuntimeError):
    """Weights that must not be saved; the message says where they were to go, why not, and what to do."""


def refuse_nan(named: dict, what: str) -> None:
    """Raise NotSaved where a trainable tensor holds NaN or infinity. named: name → tensor; one look at the device."""
    import torch

    if not named:
        return
    finite = torch.stack([torch.isfinite(tensor).all().cpu() for tensor in named.values()])
    if bool(finite.all()):
        return
    bad = [name for name, good in zip(named, finite.tolist(), strict=True) if not good]
    raise NotSaved(
        f"{what} is not saved: {len(bad)} of {len(named)} trained tensors hold NaN or infinity ({bad[0]} first). Training "
        "cannot recover from that; resume from the last state, with a lower learning rate or with bf16 in place of fp16"
    )


def save_weights(network: object, file: str, dtype: object, metadata: dict | None) -> None:
    """`network.save_weights(file, …)`, whole or not at all. Stands in for that call in `train()`."""
    from guards import checkpoint

    refuse_nan(_trained(network), file)
    with checkpoint.writing_file(file) as temporary:
        network.save_weights(str(temporary), dtype, metadata)


def apply_to_accelerator(module: ModuleType) -> None:
    """Every state is written aside."""

    def make(original: Callable) -> Callable:
        def save_state(self, output_dir=None, *args, **kwargs):
            kind = getattr(self.distributed_type, "name", str(self.distributed_type))
            if output_dir is None or kind in SHARDED:
                session.say(f"this state ({kind}) is written by accelerate alone, without a guard file")
                return original(self, output_dir, *args, **kwargs)
            from guards import checkpoint

            for model in self._models:
                refuse_nan(_trained(model), str(output_dir))
            step, epoch = _numbers(Path(output_dir))
            with checkpoint.writing(output_dir, step, epoch) as temporary:
                original(self, str(temporary), *args, **kwargs)
            return output_dir

        return save_state

    wrap(module, "Accelerator.save_state", make)


def apply_to_util(module: ModuleType) -> None:
    """Old states and models: out of sight at once, then deleted; a disk that refuses does not end the run."""
    module.shutil = Pruning()


class Pruning:
    """`shutil`, with a `rmtree` for sd-scripts' deletion of what is old."""

    def __getattr__(self, name: str) -> object:
        return getattr(shutil, name)

    @staticmethod
    def rmtree(path: str | os.PathLike) -> None:
        """Delete an old state, unless it is the last good one."""
        from guards import checkpoint

        try:
            if not checkpoint.retire(path):
                session.say(f"{path} is kept: no other state verifies, so it is the last good one")
        except OSError as error:
            session.say(f"{path} was not deleted ({error}); delete it by hand")


def apply_to_trainer(module: ModuleType) -> None:
    """Before anything looks for a state: what killed writers have left is removed, or put back where it is whole."""

    def make(original: Callable) -> Callable:
        def train(self, args):
            if os.environ.get("RANK", "0") == "0" and args.output_dir:
                from guards import checkpoint

                for path in checkpoint.sweep(args.output_dir, args.output_name):
                    session.say(f"{path}, left by a killed process, was removed")
            return original(self, args)

        return train

    wrap(module, "NetworkTrainer.train", make)


def rewrite(tree: ast.Module) -> ast.Module:
    """Move the end of the trackers behind the last saves, and route the LoRA through `save_weights`."""
    train = find_function(tree, "NetworkTrainer.train")
    trees.require(train, ("accelerator", "args"))
    end = trees.find_statement(train, ast.Expr, "accelerator.end_training()")
    save = trees.find_statement(train, ast.Expr, "unwrapped_nw.save_weights(ckpt_file, save_dtype, metadata_to_save)")
    last = trees.find_statement(train, ast.Expr, "train_util.save_state_on_train_end(args, accelerator)")
    body = trees.body_of(train, end)
    if body is not train.body or not any(last in ast.walk(node) for node in body[body.index(end) :]):
        raise DoesNotFit("accelerator.end_training() does not stand before the last save in train()")
    body.remove(end)
    body.append(end)
    save.value = ast.parse("_hangproof_save(unwrapped_nw, ckpt_file, save_dtype, metadata_to_save)", mode="eval").body
    train.body[:0] = trees.statements("from sd_scripts_patches.save import save_weights as _hangproof_save")
    return tree


def _trained(model: object) -> dict:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def _numbers(folder: Path) -> tuple[int, int]:
    """(steps, epochs) completed, for the guard file: the run's own, else what the folder's name says."""
    from sd_scripts_patches.resume import run

    if run.step:
        return run.step, run.epochs_done
    match = _NUMBERS.search(folder.name)
    return int(match["step"] or 0) if match else 0, int(match["epoch"] or 0) if match else 0


PATCH = Patch(
    name="save",
    why="a kill in mid-save leaves a state that looks whole; a hung tracker loses the last save",
    targets=(
        Target(MODULE, "NetworkTrainer.train", params=("self", "args")),
        Target(ACCELERATOR, "Accelerator.save_state", params=("self", "output_dir")),
        Target(UTIL, "save_and_remove_state_stepwise", params=("args", "accelerator", "step_no")),
        Target(UTIL, "save_and_remove_state_on_epoch_end", params=("args", "accelerator", "epoch_no")),
        Target(UTIL, "save_state_on_train_end", params=("args", "accelerator")),
        Target(UTIL, "shutil"),
    ),
    apply={ACCELERATOR: apply_to_accelerator, UTIL: apply_to_util, MODULE: apply_to_trainer},
    rewrite={MODULE: rewrite},
)
