"""The state of the training loop: everything that determines the next step, as one JSON file in a state folder.

accelerate already writes weights, optimizer and LR schedule. This file holds what is missing there: the counts, the
position in the epoch, the loss averages and the random generators. JSON and not pickle: a state from someone else is
read without running its code, and floats keep all digits (`repr` round-trips).

The generators are stored at three points, because a resumed run must draw the numbers of the uninterrupted one: `now`
(at the save), `epoch_start` (the order of the epoch and the loader's base seed are drawn there) and `fetch` (right
before the next batch was read: accelerate's loader reads one batch ahead, so without workers that batch has consumed
random numbers *before* the save).
"""

from __future__ import annotations

import base64
import importlib
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FILE = "hangproof_resume.json"
GRADIENTS = "hangproof_gradients.bin"
NORMS = ("org_weight_norm_estimate", "combined_weight_norms", "grad_norms")
VERSION = 1
ACCELERATORS = ("cuda", "xpu")


class ResumeError(RuntimeError):
    """A state that cannot be resumed; the message says which, why, and what to do."""


@dataclass
class TrainerState:
    """The names of the fields are those of the JSON file.

    step: completed optimizer steps. epoch: the current one, from 1. batch: batches of it that have been trained.
    epoch_over: its batches are complete and what follows them (validation, the files of the epoch) has started.
    batches, accumulation, processes, workers: the shape of the run for which `batch` is valid.
    losses: list and total of LossRecorder, the loss of the last step included.
    now, epoch_start, fetch: see above; `fetch` also holds the counts that the data set saw, and is None when workers
        read the data.
    known: False for a state that was inferred, not written by us.
    extra: what one trainer alone needs.
    """

    step: int
    epoch: int
    batch: int
    epoch_over: bool
    batches: int
    accumulation: int
    processes: int
    workers: int
    losses: dict[str, Any] = field(default_factory=dict)
    now: dict[str, Any] | None = None
    epoch_start: dict[str, Any] | None = None
    fetch: dict[str, Any] | None = None
    known: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


def write(folder: Path, state: TrainerState) -> None:
    """Write the file into a state folder that is still incomplete (the caller syncs it and adds the guard file)."""
    text = json.dumps({"version": VERSION, **vars(state)})
    (folder / FILE).write_text(text, encoding="utf-8")


def read(folder: Path) -> TrainerState | None:
    """Return the state in a folder, or None for one that unpatched sd-scripts wrote. Raises ResumeError if damaged."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        version = content.pop("version")
    except (OSError, ValueError, KeyError) as error:
        raise ResumeError(f"{path}: cannot be read ({error}); resume from another state") from error
    if version != VERSION:
        raise ResumeError(
            f"{path}: version {version}, but this code reads {VERSION}; resume with the version that wrote it"
        )
    try:
        return TrainerState(**content)
    except TypeError as error:
        raise ResumeError(f"{path}: {error}; resume from another state") from error


def beside_weights(model: Any, trained: set[int]) -> list[tuple[Any, str]]:
    """Return what a network keeps beside its trained weights and the next step depends on: (what holds it, its name).

    Gradients of weights that no optimizer trains (LoRA-FA's, or those of text encoders with a rate of 0): kohya's trainers
    never clear them, and clip by the norm of all. Of LoRA-GGPO the norms by which the next step is perturbed.
    """
    weights = [*model.parameters()]
    fixed = [weight for weight in weights if id(weight) not in trained]
    perturbed = [module for module in model.modules() if "combined_weight_norms" in vars(module)]
    found = [(weight, "grad") for weight in fixed if len(fixed) < len(weights)]  # not those of the base model
    return found + [(module, name) for module in perturbed for name in NORMS]


def write_beside(folder: Path, beside: list[tuple[Any, str]]) -> None:
    """Write what `beside_weights` found."""
    import torch

    if beside:
        torch.save([getattr(owner, name) for owner, name in beside], folder / GRADIENTS)


def read_beside(folder: Path, beside: list[tuple[Any, str]]) -> None:
    """Restore what `write_beside` wrote, where the settings still leave the same weights untrained."""
    import torch

    if (folder / GRADIENTS).exists():
        saved = torch.load(folder / GRADIENTS, map_location="cpu", weights_only=True)
        if len(saved) == len(beside):
            for (owner, name), value in zip(beside, saved, strict=True):
                if value is not None and getattr(owner, "shape", value.shape) == value.shape:
                    setattr(owner, name, value.to(owner if name == "grad" else owner.device))


def generators(devices: bool = True) -> dict[str, Any]:
    """Return the random generators of python, numpy and torch as values of JSON; with `devices`, of accelerators too."""
    import numpy
    import torch

    name, keys, *rest = numpy.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, [int(key) for key in keys], *rest],
        "torch": pack(torch.get_rng_state()),
    }
    if devices:
        for kind in ACCELERATORS:
            if hasattr(torch, kind) and getattr(torch, kind).is_available():
                state[kind] = [pack(value) for value in getattr(torch, kind).get_rng_state_all()]
        if torch.backends.mps.is_available():
            state["mps"] = pack(torch.mps.get_rng_state())
    return state


def restore(state: dict[str, Any] | None) -> list[str]:
    """Restore `generators(...)`. Returns the kinds that could not be restored. Raises ResumeError where it is missing."""
    import numpy
    import torch

    if state is None:
        raise ResumeError(f"{FILE} holds no random generators; resume from another state")
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, numpy.asarray(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(unpack(state["torch"]))
    missing = []
    for kind in ACCELERATORS:
        available = hasattr(torch, kind) and getattr(torch, kind).is_available()
        if kind in state and available and len(state[kind]) == getattr(torch, kind).device_count():
            getattr(torch, kind).set_rng_state_all([unpack(value) for value in state[kind]])
        elif (kind in state) or available:
            missing.append(kind)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(unpack(state["mps"]))
    elif "mps" in state or torch.backends.mps.is_available():
        missing.append("mps")
    return missing


def numbers(optimizer: Any) -> dict[str, Any]:
    """Return the numbers that an optimizer keeps beside its state: ProdigyPlus the mean d of all groups, EmoNavi its rate."""
    return {key: now for key, now in vars(optimizer).items() if key[0] != "_" and isinstance(now, (int, float))}


def allow_types(optimizer: Any, folder: Path) -> None:
    """Have torch load objects of the optimizer's own library in a state, such as the norms of SCION (from torch 2.6 on).

    Only of classes, and of no large library: a state from someone else must not run what it likes.
    """
    import torch

    library = type(optimizer).__module__.split(".")[0]
    names = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", lambda path: ())
    for module, _, name in (full.rpartition(".") for path in folder.glob("optimizer*.bin") for full in names(path)):
        if module.split(".")[0] == library and library not in ("torch", "transformers"):
            found = getattr(importlib.import_module(module), name)
            if isinstance(found, type):
                torch.serialization.add_safe_globals([found])


def keep_types(optimizer: Any) -> None:
    """Have the next load of an optimizer's state keep the types of its tensors.

    torch casts them to the type of the weights. Those of ProdigyPlus are bfloat16, those of Adafactor float32 with
    --full_bf16, and the resumed optimizer would round other numbers.
    """
    saved: dict[Any, dict[str, Any]] = {}

    def before(_: Any, content: dict[str, Any]) -> None:
        saved.update(content["state"])

    def after(_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):  # EmoNavi and SPAM have a state beside that of their parameters
            state, values = optimizer.state.get(parameter, {}), saved.get(number, {})
            state.update({name: _typed(found, values[name]) for name, found in state.items() if name in values})
        for hook in hooks:
            hook.remove()

    hooks = optimizer.register_load_state_dict_pre_hook(before), optimizer.register_load_state_dict_post_hook(after)


def _typed(found: Any, saved: Any) -> Any:
    """`found`, or the saved tensor on its device where the two have other types."""
    if isinstance(saved, (list, tuple)):
        return type(saved)(map(_typed, found, saved))
    different = hasattr(saved, "dtype") and saved.dtype != found.dtype
    return saved.to(found.device) if different else found


def pack(tensor: torch.Tensor) -> str:
    """Return a tensor of bytes as base64."""
    return base64.b64encode(bytes(tensor.cpu().numpy())).decode("ascii")


def unpack(text: str) -> torch.Tensor:
    """Return the tensor of bytes that `pack` encoded."""
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
