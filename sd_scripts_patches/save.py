"""Saves are atomic, an old state is deleted only while a newer one verifies, and the last save waits for no tracker.

accelerate writes a state file by file into its final folder, and sd-scripts writes a LoRA in place: a kill in between
leaves something that looks like a checkpoint. Here each state is written to a temporary folder beside its final name,
synced, hashed and renamed (guards.checkpoint), and each LoRA likewise as a file. What a killed process left incomplete
is removed when the next one starts. Where snapshots in memory are on, a state is written in a thread
(guards/state_saves.py), and what is saved or deleted after it waits for it. sd-scripts deletes old states after the
save has returned, by its own count; each is deleted only while another one on the disk verifies, and a deletion that
fails does not end the run. Weights that contain
NaN are refused: they would replace, one by one, every state that can still be resumed.

At its end `train()` closes the trackers first and saves afterwards (a tracker that hangs loses the last state and the
LoRA). That statement is moved behind the saves, and gets a limit as a whole. musubi-tuner also deletes old LoRAs itself, in its
training loop: each goes only while a newer one verifies.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guards import checkpoint, crash, deadline, limits, world
from sd_scripts_patches import ast_utils, session, snapshots, trackers
from sd_scripts_patches.musubi import BASE, LOOP, TRAIN_UTILS
from sd_scripts_patches.patch import Incompatible, Patch, Target, around, find_function, find_one, function, with_names

if TYPE_CHECKING:
    import torch

MODULE = "train_network"
UTIL = "library.train_util"
ACCELERATOR = "accelerate.accelerator"
_NUMBERS = re.compile(r"-step(?P<step>\d{8})-state$|-(?P<epoch>\d{6})-state$")


class NotSaved(RuntimeError):
    """Weights that must not be saved; the message says where they were to go, why not, and what to do."""


def refuse_nan(tensors: dict[str, torch.Tensor], what: str) -> None:
    """Raise NotSaved when a trained tensor contains NaN or infinity. One synchronization with the device for all."""
    import torch

    if not tensors:
        return
    finite = torch.stack([torch.isfinite(tensor).all().cpu() for tensor in tensors.values()])
    if bool(finite.all()):
        return
    bad = [name for name, good in zip(tensors, finite.tolist(), strict=True) if not good]
    raise NotSaved(
        f"{what} is not saved: {len(bad)} of {len(tensors)} trained tensors hold NaN or infinity (the first is {bad[0]}). "
        "Training cannot recover from that. Resume from the last state with a lower learning rate, or with bf16 in place "
        "of fp16"
    )


def save_weights(network: Any, file: str, dtype: Any, metadata: dict[str, str] | None) -> None:
    """`network.save_weights(file, …)`, atomically, in phase "save". Replaces that call in the training."""
    snapshots.saves.begin(_step_and_epoch(Path(file))[0])
    snapshots.saves.wait()  # a state that was saved before this LoRA is complete before it
    refuse_nan(_trained(network), file)
    with session.phase("save", note=file), checkpoint.writing_file(file) as temporary:
        network.save_weights(str(temporary), dtype, metadata)


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


def end_training(accelerator: Any) -> None:
    """`accelerator.end_training()` within a limit. Replaces that call at the end of `train()`, after the last save.

    It closes the trackers and then waits for the other ranks. A run whose files are complete does not hang there: one
    process goes on to its exit without the trackers; of several, each exits as done when the limit expires.
    """
    if accelerator.num_processes == 1:
        names = ", ".join(tracker.name for tracker in accelerator.trackers) or "experiment trackers"
        try:
            limit_s = limits.seconds("trackers_end_s")
            deadline.call(accelerator.end_training, seconds=limit_s, what=f"{names} to finish")
        except TimeoutError as error:
            trackers.give_up(str(error))
        return

    def exit_as_done(seconds: float, what: str) -> None:
        note = f"waited {seconds:g} s for {what}; every file of the run is complete, exiting as done"
        session.log(note)
        session.heartbeat().end("done", note)
        crash.exit_now(0)

    what = "the trackers and the other ranks to end the training"
    with session.Deadline(limits.seconds("end_training_s"), what, action=exit_as_done):
        accelerator.end_training()


@around
def _write_aside(original: Callable, self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Write every state to a temporary folder first."""
    kind = getattr(self.distributed_type, "name", str(self.distributed_type))
    if snapshots.capturing():
        return original(self, output_dir, *args, **kwargs)
    if output_dir is None or kind in snapshots.SHARDED:
        session.log(f"accelerate writes this state ({kind}) itself, without a guard file")
        return original(self, output_dir, *args, **kwargs)
    step, epoch = _step_and_epoch(Path(output_dir))
    snapshots.saves.begin(step)
    for model in self._models:
        refuse_nan(_trained(model), str(output_dir))
    usual = not args and not kwargs and _NUMBERS.search(Path(output_dir).name)  # else the LoRA of the end follows
    if usual and snapshots.write_later(self, Path(output_dir), step, epoch):
        return output_dir
    snapshots.saves.wait()
    with checkpoint.writing(output_dir, step, epoch) as temporary:
        original(self, str(temporary), *args, **kwargs)
    return output_dir


def rmtree(path: str | os.PathLike[str]) -> None:
    """Delete an old state when the newer one is complete, unless it is the last valid one. A failure ends no run."""

    def retire() -> None:
        try:
            if not checkpoint.retire(path):
                session.log(f"{path} is kept: no other state verifies, so it is the last valid one")
        except OSError as error:
            session.log(f"{path} was not deleted ({error}); delete it by hand")

    snapshots.saves.then(f"{path}, which is deleted", retire)


def finish_deletions(args: Any, step: int, epoch: int) -> None:
    """Delete what the last saves up to this step and epoch had still to delete when a kill ended them."""
    base = os.path.join(args.output_dir, str(args.output_name))
    by_step, by_epoch = args.save_every_n_steps or 0, args.save_every_n_epochs or 0

    def finish() -> None:
        for kind, suffix, remove in (("_state", "-state", rmtree), ("", ".safetensors", remove_weights)):
            pairs = []  # the names of a save and of what it deletes, as kohya's trainers compute it
            steps = getattr(args, f"save_last_n_steps{kind}") or args.save_last_n_steps
            if by_step and steps:
                last = step - step % by_step
                pairs.append((f"-step{last:08d}", f"-step{(last - steps - 1) // by_step * by_step:08d}"))
            epochs = getattr(args, f"save_last_n_epochs{kind}") or args.save_last_n_epochs
            if by_epoch and epochs:
                last = epoch - epoch % by_epoch
                pairs.append((f"-{last:06d}", f"-{last - by_epoch * epochs:06d}"))
            for new, old in pairs:
                if os.path.exists(f"{base}{new}-state") and os.path.exists(f"{base}{old}{suffix}"):
                    remove(f"{base}{old}{suffix}")

    snapshots.saves.then("old files, which are deleted", finish)


@around
def _sweep_first(original: Callable, self: Any, args: Any) -> Any:
    """Remove what killed processes left incomplete, or restore what is complete, before anything looks for a state."""
    if world.rank() == 0 and args.output_dir:
        for path in checkpoint.sweep(args.output_dir, args.output_name):
            session.log(f"removed {path}, which a killed process left")
    return original(self, args)


def rewrite(tree: ast.Module, loop: str = "NetworkTrainer.train") -> ast.Module:
    """Move the end of the trackers behind the last saves of the function `loop`, and save LoRAs through `save_weights`.

    The LoRA is saved in that function, or in another method of the trainer (sd-scripts v0.11).
    """
    train = find_function(tree, loop)
    ast_utils.require_variables(train, ("accelerator", "args"))
    end = ast_utils.find_call(train, "end_training", "accelerator")
    last = ast_utils.find_call(train, "save_state_on_train_end")
    trainer = find_one(tree, ast.ClassDef, lambda node: node.name == "NetworkTrainer", "class NetworkTrainer")
    save = ast_utils.find_statement(
        trainer, ast.Expr, "unwrapped_nw.save_weights(ckpt_file, save_dtype, metadata_to_save)"
    )
    body = ast_utils.enclosing_body(train, end)
    if body is not train.body or not any(last in ast.walk(node) for node in body[body.index(end) :]):
        raise Incompatible(f"accelerator.end_training() is not before the last save in {loop}()")
    body.remove(end)
    body += ast_utils.parse_statements("_hangproof_end(accelerator)")
    save.value = ast_utils.parse_expression("_hangproof_save(unwrapped_nw, ckpt_file, save_dtype, metadata_to_save)")
    functions = "end_training as _hangproof_end, save_weights as _hangproof_save"
    ast_utils.insert_import(tree, f"from sd_scripts_patches.save import {functions}")
    return tree


def _rewrite_musubi(tree: ast.Module) -> ast.Module:
    tree = rewrite(tree, LOOP)
    remove = ast_utils.find_statement(find_function(tree, LOOP), ast.Expr, "os.remove(old_ckpt_file)")
    remove.value = ast_utils.parse_expression("_hangproof_remove(old_ckpt_file)")
    ast_utils.insert_import(tree, "from sd_scripts_patches.save import remove_weights as _hangproof_remove")
    return tree


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def _step_and_epoch(folder: Path) -> tuple[int, int]:
    """Return (steps, epochs) completed for the guard file: the run's own numbers, else those in the folder's name."""
    if session.run is not None and session.run.step:
        return session.run.step, session.run.epochs_done
    match = _NUMBERS.search(folder.name)
    return (int(match["step"] or 0), int(match["epoch"] or 0)) if match else (0, 0)


SAVES = (
    "save_and_remove_state_stepwise(args, accelerator, step_no)",
    "save_and_remove_state_on_epoch_end(args, accelerator, epoch_no)",
    "save_state_on_train_end(args, accelerator)",
)
"""The functions that save states."""


def _targets(trainer: str, util: str) -> tuple[Target, ...]:
    """trainer: the module of the training. util: that of SAVES."""
    return (
        function(trainer, "NetworkTrainer.train(self, args)", _sweep_first),
        function(ACCELERATOR, "Accelerator.save_state(self, output_dir)", _write_aside),
        *(function(util, save) for save in SAVES),
        Target(util, "shutil", beside="save_and_remove_state_stepwise", make=with_names(rmtree=rmtree)),
    )


PATCH = Patch(
    name="save",
    why="a kill during a save leaves a state that looks complete; a hung tracker loses the last save",
    targets=_targets(MODULE, UTIL),
    rewrites=((function(MODULE, "NetworkTrainer.train(self, args)"), rewrite),),
)
MUSUBI = dataclasses.replace(
    PATCH,
    targets=_targets(BASE, TRAIN_UTILS),
    rewrites=((function(BASE, f"{LOOP}(self, args, accelerator)"), _rewrite_musubi),),
)
