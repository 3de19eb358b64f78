"""Snapshots in memory of kohya's trainers (guards/snapshots.py): after a step, what accelerate's save_state would write.

Decision: save_state itself is called, so a snapshot holds what a checkpoint holds, and `--resume` reads it. In this
thread `torch.save` and safetensors' `save_file`, as accelerate calls them, keep what they are given in place of writing
it; small files that hooks write go to a folder in memory and are read from there. What another version of accelerate
writes by other means is read in the same way: slower, so less often, and as complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from guards import checkpoint, snapshot_files
from guards.heartbeat import Heartbeat
from guards.snapshot_files import File
from guards.snapshots import Snapshots
from guards.state_saves import StateSaves
from sd_scripts_patches import session

SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Distributed types in which every rank writes its part of a state, so no rank can create the folder for all."""
FOLDER = "capture"  # in the folder of the snapshots
_capturing: int | None = None  # the thread whose saves are kept
_owners: weakref.WeakKeyDictionary[Any, dict[str, tuple[dict[str, Any], str]]] = weakref.WeakKeyDictionary()
saves = StateSaves(Snapshots(None), Heartbeat(None))  # of this training; without a folder they are written as ever


def capturing() -> bool:
    """Is this thread's save_state called for a snapshot?"""
    return _capturing == threading.get_ident()


class MemorySnapshots:
    """Those of one training. `loop` is its heartbeat.TrainingLoop."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self.memory = Snapshots.from_env()
        self.step = 0  # of the last boundary

    def take_if_due(self) -> None:
        """Everything that belongs to a batch is complete; a snapshot is of whole steps."""
        saves.check()
        loop, run = self.loop, session.run
        if (
            not self.memory.active
            or not loop.step
            or loop.step == self.step
            or loop.losses
            or run is None
            or run.loader is None
        ):
            return
        self.step = loop.step
        kind = getattr(loop.accelerator.distributed_type, "name", str(loop.accelerator.distributed_type))
        if kind in SHARDED:
            return self.memory.turn_off(f"a state of {kind} is in the memory of several processes")
        if self.memory.due():
            assert self.memory.folder is not None
            try:
                files = capture(loop.accelerator, self.memory.folder / FOLDER)
            except OSError as error:
                return self.memory.turn_off(f"the state of step {loop.step} has no room in memory: {error}")
            name = f"{loop.args.output_name or 'at'}-step{loop.step:08d}-state"
            self.memory.take(name, loop.step, run.epochs_done, files)


def capture(accelerator: Any, folder: Path) -> list[File]:
    """The files that `accelerator.save_state` would write; their tensors are the training's own. Raises OSError."""
    files: list[File] = []
    try:
        folder.mkdir(exist_ok=True)
        with _keeping(files, folder), _collecting(accelerator), _quiet():
            accelerator.save_state(str(folder))
        files += [
            File(path.relative_to(folder).as_posix(), "raw", path.read_bytes())
            for path in checkpoint.files_below(folder)
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return files


@contextlib.contextmanager
def _keeping(files: list[File], folder: Path) -> Iterator[None]:
    """What this thread saves below `folder` is appended to `files`."""
    global _capturing
    import torch
    from accelerate.utils import other

    original, original_safe = torch.save, getattr(other, "safe_save_file", None)

    def name_of(target: Any) -> str | None:
        if not capturing() or not isinstance(target, (str, os.PathLike)) or not Path(target).is_relative_to(folder):
            return None
        return Path(target).relative_to(folder).as_posix()

    def save(content: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        name = name_of(f)
        if name is None:
            return original(content, f, *args, **kwargs)
        files.append(File(name, "torch", content))

    def save_file(tensors: Any, filename: Any, metadata: dict[str, str] | None = None) -> Any:
        name = name_of(filename)
        if name is None and original_safe is not None:
            return original_safe(tensors, filename, metadata)
        files.append(File(str(name), "safetensors", dict(tensors), metadata))

    _capturing = threading.get_ident()
    torch.save = save
    if original_safe is not None:
        other.safe_save_file = save_file
    try:
        yield
    finally:
        _capturing, torch.save = None, original
        if original_safe is not None:
            other.safe_save_file = original_safe


@contextlib.contextmanager
def _collecting(accelerator: Any) -> Iterator[None]:
    """Inside, accelerate gets the weights of its models without milliseconds of walking through their modules.

    kohya's hook drops the weights of all models but the network; where it does not, a frozen model's are collected.
    """
    collect = accelerator.get_state_dict
    left_out: dict[int, tuple[Any, Any]] = {}  # id of an empty state → its model, and it

    def get_state_dict(model: Any, *args: Any, **kwargs: Any) -> Any:
        first = next(model.parameters(), None)
        if first is None or first.requires_grad:
            return _weights(model, lambda: collect(model, *args, **kwargs))
        state: dict[str, Any] = {}
        left_out[id(state)] = model, state
        return state

    def fill(models: Any, weights: list[Any], folder: str) -> None:
        for index, state in enumerate(weights):
            if id(state) in left_out:
                weights[index] = collect(left_out[id(state)][0], unwrap=False)

    hook = accelerator.register_save_state_pre_hook(fill)  # after all others
    accelerator.get_state_dict = get_state_dict
    try:
        yield
    finally:
        del accelerator.get_state_dict
        hook.remove()


def _weights(model: Any, collect: Callable[[], Any]) -> Any:
    """What `collect` returns, the model's state. From the second time on, its tensors are taken from where they were."""
    found = _owners.get(model)
    if found:
        return {name: owner[key].detach() for name, (owner, key) in found.items()}
    state = collect()
    if found is None:
        _owners[model] = _owners_of(model, state)
    return state


def _owners_of(model: Any, state: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Name → the dict of a module that holds this tensor, and its key; {} where the state is not just these tensors.

    accelerate would save each of them as it is: contiguous, and none shares its memory with another one.
    """
    found = {
        f"{prefix}.{key}" if prefix else key: (tensors, key)
        for prefix, module in model.named_modules()
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items()
        if tensor is not None and key not in module._non_persistent_buffers_set
    }
    same = list(found) == list(state) and all(
        state[name].data_ptr() == owner[key].data_ptr() and state[name].is_contiguous()
        for name, (owner, key) in found.items()
    )
    apart = same and len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
    return found if apart else {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """accelerate and kohya's hooks log each file that they save; after each step that would fill the log."""

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or not capturing()

    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(keep)


def attach(loop: Any) -> None:
    """Take the snapshots of this training, after whatever else follows a batch, and write its states in a thread."""
    global saves
    ours = MemorySnapshots(loop)
    session.on_batch_end.append(ours.take_if_due)
    if not getattr(loop.args, "save_state_to_huggingface", False):  # which reads each state as soon as it is saved
        saves = StateSaves(ours.memory, loop.beat)


def write_later(accelerator: Any, folder: Path, step: int, epoch: int) -> bool:
    """Have the state `folder` written in a thread, as `accelerator.save_state` would; False where that cannot be."""
    if saves.snapshots.folder is None or not saves.snapshots.active:
        return False
    try:
        files = capture(accelerator, saves.snapshots.folder / FOLDER)
    except OSError:  # another program has filled the memory
        return False
    saves.save(folder.name, step, epoch, files, lambda files: snapshot_files.write_state(folder, files, step, epoch))
    return True


def complete_saves(output: str, step: int) -> None:
    """Write the states that a killed process was saving. `step`: from which this one goes on."""
    folder, write = Path(output), snapshot_files.write_state
    saves.redo(step, lambda guard, files: write(folder / guard["name"], files, guard["step"], guard["epoch"]))
