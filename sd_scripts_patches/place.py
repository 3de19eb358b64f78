"""The place of a run: everything that decides what its next step will be, as one JSON file inside a state folder.

Weights, optimizer and LR schedule are in the state already (accelerate writes them). What is missing there is kept
here: the counts, the position in the epoch, the loss averages and the random generators. JSON, not pickle: reading a
state that someone sent runs nothing of theirs, and the digits of a float survive (`repr` round-trips).

Three readings of the generators are kept, because a resumed run must draw what the undisturbed one drew:
`now` (at the save), `epoch_start` (the order of the epoch and the loader's base seed are drawn there) and `fetch`
(right before the batch that follows was read: accelerate's loader reads one batch ahead, so without workers that
batch has consumed random numbers *before* the save).
"""

from __future__ import annotations

import base64
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "hangproof_resume.json"
VERSION = 1
ACCELERATORS = ("cuda", "xpu")


class ResumeError(RuntimeError):
    """A state that cannot be resumed; the message says which, why, and what to do."""


@dataclass
class Place:
    """step: optimizer steps done. epoch: the one under way, from 1. batch: batches of it that have been trained.
    epoch_over: its batches are done and what follows them (validation, the epoch's files) has begun.
    batches, accumulation, processes, workers: the shape of the run, by which `batch` can be trusted.
    losses: LossRecorder's list and total, the last step's loss included. fetch: see above, with the counts the data
    set saw; None where workers read the data. known: False for a place that was deduced, not written by us."""

    step: int
    epoch: int
    batch: int
    epoch_over: bool
    batches: int
    accumulation: int
    processes: int
    workers: int
    losses: dict = field(default_factory=dict)
    now: dict | None = None
    epoch_start: dict | None = None
    fetch: dict | None = None
    known: bool = True


def write(folder: Path, place: Place) -> None:
    """Write the place into a state folder that is still being made (whoever makes it syncs and guards it)."""
    text = json.dumps({"version": VERSION, **asdict(place)})
    (folder / FILE).write_text(text, encoding="utf-8")


def read(folder: Path) -> Place | None:
    """The place kept in a state, or None for a state of unpatched sd-scripts. Raises ResumeError for a damaged file."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        version = content.pop("version")
    except (OSError, ValueError, KeyError) as error:
        raise ResumeError(f"{path}: does not parse ({error}); resume from another state") from error
    if version != VERSION:
        raise ResumeError(
            f"{path}: version {version}, this code reads {VERSION}; resume with the version that wrote it"
        )
    try:
        return Place(**content)
    except TypeError as error:
        raise ResumeError(f"{path}: {error}; resume from another state") from error


def generators(devices: bool = True) -> dict:
    """The state of every random generator the trainer uses: python, numpy, torch; with `devices`, the accelerators' too."""
    import numpy
    import torch

    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    state: dict = {
        "python": [version, numbers, gauss],
        "numpy": [name, keys, position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if devices:
        for kind in ACCELERATORS:
            if hasattr(torch, kind) and getattr(torch, kind).is_available():
                state[kind] = getattr(torch, kind).get_rng_state_all()
        if torch.backends.mps.is_available():
            state["mps"] = torch.mps.get_rng_state()
    return state


def restore(state: dict) -> list[str]:
    """Put `generators(...)` back, as captured or as it came out of JSON. Returns the kinds that could not be."""
    import numpy
    import torch

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, numpy.asarray(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    missing = []
    for kind in ACCELERATORS:
        here = hasattr(torch, kind) and getattr(torch, kind).is_available()
        if kind in state and here and len(state[kind]) == getattr(torch, kind).device_count():
            getattr(torch, kind).set_rng_state_all(state[kind])
        elif (kind in state) or here:
            missing.append(kind)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    elif "mps" in state or torch.backends.mps.is_available():
        missing.append("mps")
    return missing


def to_json(state: dict | None) -> dict | None:
    """`generators(...)` with its arrays and tensors as plain values."""
    if state is None:
        return None
    plain = dict(state)
    name, keys, *rest = state["numpy"]
    plain["numpy"] = [name, [int(k) for k in keys], *rest]
    for kind in ("torch", "mps"):
        if kind in state:
            plain[kind] = pack(state[kind])
    for kind in ACCELERATORS:
        if kind in state:
            plain[kind] = [pack(t) for t in state[kind]]
    return plain


def from_json(plain: dict | None) -> dict | None:
    """The inverse of `to_json`."""
    if plain is None:
        return None
    state = dict(plain)
    for kind in ("torch", "mps"):
        if kind in plain:
            state[kind] = unpack(plain[kind])
    for kind in ACCELERATORS:
        if kind in plain:
            state[kind] = [unpack(t) for t in plain[kind]]
    return state


def pack(tensor: object) -> str:
    """A tensor of bytes as base64."""
    return base64.b64encode(bytes(tensor.cpu().numpy())).decode("ascii")


def unpack(text: str) -> object:
    """The tensor of bytes that `pack` was given."""
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
