"""States to resume from: LoRA weights, optimizer and step, saved atomically.

A state folder is valid once `guards.checkpoint` has written its guard file, which is last. No random state is saved,
because every random number is a function of the step (`data_order.py`). The guard file records the settings of the run
(`belongs`): a resume with another rank, optimizer or model is refused, a resume with other data is reported.
"""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

from guards import checkpoint, snapshot_files
from guards.snapshot_files import File, SnapshotError
from trainer import lora
from trainer.errors import TrainError
from trainer.optimizers import KINDS

MUST_MATCH = ("network_dim", "network_alpha", "train_blocks", "optimizer_type", "model", "ema_decay")
AVERAGE = "average.safetensors"
BATCHES = ("gradient_accumulation_steps", "world")  # their product is what counts: the batches of a step
SHOULD_MATCH = ("seed", "data", *BATCHES)
# Options of optimizers that decide what a state keeps of each weight, or what these numbers mean.
IN_MOMENTS = ("adamw amsgrad", "adafactor beta1", "prodigy slice_p", "adamwschedulefree betas")
FLAGS = [name for name in (*MUST_MATCH, *SHOULD_MATCH) if name not in ("model", "data", "world")]  # of the command line


def step_name(slug: str, step: int) -> str:
    """The name of a LoRA or state of a step, without its ending."""
    return f"{slug}-step{step:08d}"


def save(folder: Path, files: list[File], *, step: int, epoch: int, belongs: dict) -> None:
    """Writes the state folder. An older state with this name is replaced when the new one is complete."""
    with checkpoint.writing(folder, step, epoch, belongs=belongs) as temporary:
        for file in files:
            (temporary / file.name).write_bytes(data_of(file))


def data_of(file: File) -> bytes | memoryview:
    """The bytes of a file of a state."""
    if file.kind == "torch":  # through memory: on a full disk, torch's own writer raises an error without the cause
        import torch

        buffer = io.BytesIO()
        torch.save(file.content, buffer)
        return buffer.getbuffer()
    if file.kind == "safetensors":
        return lora.serialize({name: t.detach().cpu() for name, t in file.content.items()}, "F32", {})
    return bytes(file.content)


def check(folder: Path) -> None:
    """Raises a TrainError when the state is invalid. Called before a model is loaded, which takes minutes.

    A state from a snapshot in memory is made here.
    """
    try:
        snapshot_files.restore(folder)
    except SnapshotError as problem:
        raise TrainError(f"--resume {folder}: {problem}") from problem
    if not folder.is_dir():
        raise TrainError(f"--resume {folder}: the folder does not exist; correct the path")
    wrong = checkpoint.problems(folder)
    if wrong:
        raise TrainError(f"--resume {folder}: this state is damaged: {'; '.join(wrong)}; resume from another state")


def load(folder: Path, t) -> dict:
    """Restores a state that `check` found valid in a training; returns its train_state (`current_step`, `losses`, …).

    Raises: TrainError when the state belongs to another run or cannot be read.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    compare(folder, t.belongs, t.log)
    scaler = t.accelerator.scaler
    try:
        weights = load_file(folder / "model.safetensors")
        averages = load_file(folder / AVERAGE) if t.average else {}
        moments = torch.load(folder / "optimizer.bin", map_location="cpu", weights_only=True)
        scale = torch.load(folder / "scaler.pt", weights_only=True) if scaler is not None else None
        state = json.loads((folder / "train_state.json").read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError, RuntimeError, EOFError) as problem:
        raise TrainError(
            f"--resume {folder}: this state cannot be read: {problem}; resume from another state"
        ) from problem
    if odd := sorted(weights.keys() ^ t.parameters.keys()):
        raise TrainError(
            f"--resume {folder}: {len(odd)} LoRA layers are not those of this run: {odd[0]}, …; resume from another state"
        )
    for name, parameter in t.parameters.items():
        parameter.data.copy_(weights[name])
    for name, value in t.average.items():
        value.copy_(averages[name])
    kind = t.args.optimizer_type
    options = ("lr", *KINDS[kind].options)
    asked = {key: value for key, value in t.optimizer.param_groups[0].items() if key in options}
    t.optimizer.load_state_dict(moments)
    (group,) = t.optimizer.param_groups
    for key, value in asked.items():
        if f"{kind} {key}" in IN_MOMENTS and group.get(key, value) != value:
            raise TrainError(
                f"--resume {folder}: --optimizer_args {key} is {group[key]} in the state and {value} in this run; "
                "use the same value, or start without --resume"
            )
    group.update(asked)  # the other --optimizer_args may have changed since
    if scale is not None:
        scaler.load_state_dict(scale)
    return state


def compare(folder: Path, belongs: dict, log: Callable[[str], None]) -> None:
    """Raises: TrainError when a state belongs to another run; logs what changed the result only."""
    saved = json.loads((folder / "hangproof.json").read_text(encoding="utf-8")).get("belongs")
    if saved is None:
        raise TrainError(
            f"--resume {folder}: not a state of the built-in trainer; resume a state of sd-scripts with sd-scripts"
        )
    for key in MUST_MATCH:
        if saved.get(key) != belongs.get(key):
            raise TrainError(
                f"--resume {folder}: {key} is {saved.get(key)} in the state and {belongs.get(key)} in this run; "
                "use the same value, or start without --resume"
            )
    for key in SHOULD_MATCH:
        if saved.get(key) != belongs[key] and not (key in BATCHES and batches(saved) == batches(belongs)):
            log(
                f"resume: {key} changed from {saved.get(key)} to {belongs[key]}, so the result differs from an undisturbed run"
            )


def batches(belongs: dict) -> int:
    """The batches of one optimizer step over all processes; -1 when a state does not say."""
    accumulated, processes = (belongs.get(key) for key in BATCHES)
    return accumulated * processes if isinstance(accumulated, int) and isinstance(processes, int) else -1


def drop_old(
    output: Path,
    slug: str,
    kind: str,
    last_gone: int,
    state: bool,
    log: Callable[[str], None],
    every: int | None = None,
) -> None:
    """Deletes the numbered LoRAs (with `state`: states) of `kind` "step" or "epoch" up to number `last_gone`.

    every: only those whose number is a multiple of it. A LoRA in between was requested by the user, and stays.

    `checkpoint.retire` keeps a state that is the only valid one. A failure ends no run: on Windows, a program that has
    a file open, such as a virus scanner or one that draws with the LoRA, keeps it.
    """
    number = {"step": r"-step(\d{8})", "epoch": r"-(\d{6})"}[kind]
    tail = "-state" if state else r"\.safetensors"
    found = [(re.fullmatch(re.escape(slug) + number + tail, path.name), path) for path in sorted(output.iterdir())]
    for path in (p for match, p in found if match and int(match[1]) <= last_gone and int(match[1]) % (every or 1) == 0):
        try:
            if not state:
                path.unlink()
            elif not checkpoint.retire(path):
                log(f"{path} is kept, because no other state is valid; check the disk")
        except OSError as error:
            log(f"{path} was not deleted ({error.strerror}); delete it by hand")
