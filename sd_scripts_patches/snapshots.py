"""Snapshots in memory of kohya's trainers (guards/snapshots.py): after a step, what accelerate's save_state would write.

Decision: save_state itself is called, so a record holds what a checkpoint holds, and `--resume` reads it. In this thread
`torch.save` and safetensors' `save_file`, as accelerate calls them, keep what they are given in place of writing it; small
files that hooks write go to a folder in memory and are read from there. What another version of accelerate writes by other
means is read in the same way: slower, so less often, and as complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from guards.snapshot_record import File, RecordError
from guards.snapshots import Snapshots, restore
from sd_scripts_patches import session
from sd_scripts_patches.trainer_state import ResumeError

FOLDER = "capture"  # in the folder of the snapshots
_capturing: int | None = None  # the thread whose saves are kept


def capturing() -> bool:
    """Is this thread's save_state called for a snapshot?"""
    return _capturing == threading.get_ident()


def make_state(resume: str) -> None:
    """Make the state that `--resume` names when it is a snapshot in memory. Raises ResumeError."""
    try:
        restore(resume)
    except RecordError as error:
        raise ResumeError(f"--resume {resume}: {error}") from error


class MemorySnapshots:
    """Those of one training. `loop` is its heartbeat.TrainingLoop."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self.memory = Snapshots.from_env()
        self.step = 0  # of the last boundary

    def take_if_due(self) -> None:
        """Everything that belongs to a batch is complete; a snapshot is of whole steps."""
        from sd_scripts_patches import resume, save

        loop, run = self.loop, resume.run
        if not self.memory.active or not loop.step or loop.step == self.step or loop.losses or run.loader is None:
            return
        self.step = loop.step
        kind = getattr(loop.accelerator.distributed_type, "name", str(loop.accelerator.distributed_type))
        if kind in save.SHARDED:
            return self.memory.turn_off(f"a state of {kind} is in the memory of several processes")
        if self.memory.due():
            assert self.memory.folder is not None
            files = capture(loop.accelerator, self.memory.folder / FOLDER)
            name = f"{loop.args.output_name or 'at'}-step{loop.step:08d}-state"
            self.memory.take(name, loop.step, run.epochs_done, files)


def capture(accelerator: Any, folder: Path) -> list[File]:
    """The files that `accelerator.save_state` would write; their tensors are the training's own."""
    files: list[File] = []
    try:
        folder.mkdir(exist_ok=True)
        with _keeping(files, folder), _quiet():
            accelerator.save_state(str(folder))
        files += [
            File(path.relative_to(folder).as_posix(), "raw", path.read_bytes())
            for path in sorted(folder.rglob("*"))
            if path.is_file()
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
    """Take the snapshots of this training, after whatever else follows a batch."""
    session.on_batch_end.append(MemorySnapshots(loop).take_if_due)
