"""States to resume from: LoRA weights, optimizer and step, whole or not at all.

A state folder counts once `guards.checkpoint` has written its guard file, last. Nothing random is kept, since every
random number is a function of the step (`order.py`). What a state belongs to (rank, blocks, optimizer, model) is kept
beside it: going on with another rank is refused by name, going on with other data is said.
"""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

from guards import checkpoint
from trainer import lora
from trainer.errors import TrainError

MUST_MATCH = ("network_dim", "network_alpha", "train_blocks", "optimizer_type", "model")
SHOULD_MATCH = ("seed", "data", "gradient_accumulation_steps", "world")


def step_name(slug: str, step: int) -> str:
    return f"{slug}-step{step:08d}"


def epoch_name(slug: str, epoch: int) -> str:
    return f"{slug}-{epoch:06d}"


def save(
    folder: Path, *, step: int, epoch: int, parameters: dict, optimizer, scaler, belongs: dict, losses: list
) -> None:
    """Writes the state folder; an older one of that name is replaced only by a whole one."""
    import torch

    with checkpoint.writing(folder, step, epoch, belongs=belongs) as temporary:
        weights = {name: p.detach().to("cpu", torch.float32) for name, p in parameters.items()}
        (temporary / "model.safetensors").write_bytes(lora.serialize(weights, "F32", {}))
        write(temporary / "optimizer.bin", optimizer.state_dict())
        if scaler is not None:
            write(temporary / "scaler.pt", scaler.state_dict())
        state = {"current_epoch": epoch, "current_step": step, "losses": losses}
        (temporary / "train_state.json").write_text(json.dumps(state), encoding="utf-8")


def write(path: Path, content: dict) -> None:
    """torch.save by way of memory: on a full disk its own writer raises an error that does not say so."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getbuffer())


def check(folder: Path) -> None:
    """Raises a TrainError when the state is not whole. Called before any model is loaded: minutes, with a real one."""
    if not folder.is_dir():
        raise TrainError(f"--resume {folder}: no such folder")
    wrong = checkpoint.problems(folder)
    if wrong:
        raise TrainError(f"--resume {folder}: this state is damaged: {'; '.join(wrong)}; resume from another one")


def load(folder: Path, *, parameters: dict, optimizer, scaler, belongs: dict, say: Callable[[str], None]) -> dict:
    """Puts a state that `check` found whole back in place; returns its train_state (`current_step`, `losses`, …).

    Raises: TrainError when it belongs to another run or cannot be read.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    compare(folder, belongs, say)
    try:
        weights = load_file(folder / "model.safetensors")
        moments = torch.load(folder / "optimizer.bin", map_location="cpu", weights_only=True)
        scale = torch.load(folder / "scaler.pt", weights_only=True) if scaler is not None else None
        state = json.loads((folder / "train_state.json").read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError, RuntimeError, EOFError) as problem:
        raise TrainError(
            f"--resume {folder}: this state cannot be read: {problem}; resume from another one"
        ) from problem
    if set(weights) != set(parameters):
        odd = sorted(set(weights) ^ set(parameters))
        raise TrainError(f"--resume {folder}: other LoRA layers than this run: {', '.join(odd[:3])}, … ({len(odd)})")
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])
    optimizer.load_state_dict(moments)
    if scale is not None:
        scaler.load_state_dict(scale)
    return state


def compare(folder: Path, belongs: dict, say: Callable[[str], None]) -> None:
    saved = json.loads((folder / "hangproof.json").read_text(encoding="utf-8")).get("belongs")
    if saved is None:
        raise TrainError(f"--resume {folder}: not a state of this trainer (a state of sd-scripts resumes there)")
    for key in MUST_MATCH:
        if saved.get(key) != belongs[key]:
            raise TrainError(f"--resume {folder}: its {key} is {saved.get(key)}, this run's is {belongs[key]}")
    for key in SHOULD_MATCH:
        if saved.get(key) != belongs[key]:
            say(f"resume: {key} is {belongs[key]}, it was {saved.get(key)}: from here on the run is not a repetition")


def drop_old(output: Path, slug: str, kind: str, last_gone: int, state: bool, say: Callable[[str], None]) -> None:
    """Removes the numbered LoRAs (`state`: states) of `kind` step or epoch up to number `last_gone`.

    A state goes by `checkpoint.retire`: never while no other one reads back whole.
    """
    number = {"step": r"-step(\d{8})", "epoch": r"-(\d{6})"}[kind]
    tail = "-state" if state else r"\.safetensors"
    found = [(re.fullmatch(re.escape(slug) + number + tail, path.name), path) for path in sorted(output.iterdir())]
    for path in (path for match, path in found if match and int(match[1]) <= last_gone):
        if not state:
            path.unlink()
        elif not checkpoint.retire(path):
            say(f"{path} is kept: no newer state reads back as it was written; check that disk")
