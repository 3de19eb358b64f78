"""What in a training script is known to hang: rules as data (lint.toml), checks as pure functions, each with its mend.

A check looks at one training command and returns None where all is well, else the changes that mend it (none when only a
person can). A mend never changes what is learned: no learning rate, step count, data or precision.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from presets.tables import _table
from presets.training import Training, file_name, trainings


@dataclass(frozen=True)
class Drop:
    """Leave a flag out."""

    flag: str


@dataclass(frozen=True)
class Set:
    """Give a flag this value, whether or not it is there."""

    flag: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Guard:
    """Start the script through the guarded launcher."""


@dataclass(frozen=True)
class Stage:
    """Write to a local folder, and copy it to where the output was to go when the script ends."""

    local: str
    wanted: str


Change = Drop | Set | Guard | Stage
Mend = list[Change] | None


@dataclass(frozen=True)
class Finding:
    """One thing that is known to hang, with why and what mends it."""

    id: str
    level: str
    line: int
    why: str
    source: str
    mend: str
    fixable: bool


def trains_single_blocks(t: Training) -> bool:
    """Whether only FLUX's single blocks get a LoRA, and none that needs the input layers."""
    words = [v or "" for v in (t.flags["network_args"].values if t.has("network_args") else [])]
    last = [w.partition("=")[2] for w in words if w.startswith("train_blocks=")][-1:]
    return last == ["single"] and not any(w.startswith("in_dims=") for w in words)


def is_flux(t: Training) -> bool:
    """Whether the command trains a LoRA of FLUX, the only family that has a split mode."""
    return t.module == "trainer" or file_name(t.command.words[t.script].shape) == "flux_train_network.py"


def _unguarded(t: Training) -> bool:
    return t.module == ""


def block_swap(t: Training) -> Mend:
    if not t.has("blocks_to_swap") or t.number("blocks_to_swap") == 0:
        return None
    saves_memory = is_flux(t) and trains_single_blocks(t) and not t.has("split_mode")
    return [Drop("blocks_to_swap"), *([Set("split_mode")] if saves_memory else [])]


def split_mode(t: Training) -> Mend:
    if not (t.has("split_mode") and _unguarded(t)):
        return None
    return [Guard()] if trains_single_blocks(t) else [Drop("split_mode")]


def split_mode_conflict(t: Training) -> Mend:
    if not t.has("split_mode") or _unguarded(t):
        return None
    if not trains_single_blocks(t):
        return None if t.opaque else [Drop("split_mode")]
    return [Drop("cpu_offload_checkpointing")] if t.has("cpu_offload_checkpointing") else None


def fused_optimizer(t: Training) -> Mend:
    fused = [f for f in ("blockwise_fused_optimizers", "fused_backward_pass", "fused_optimizer_groups") if t.has(f)]
    return [Drop(f) for f in fused] or None


def no_state(t: Training) -> Mend:
    saves = t.has("save_state") or t.opaque
    every = [f for f in ("save_every_n_epochs", "save_every_n_steps", "save_n_epoch_ratio") if t.has(f)]
    if saves and (every or t.opaque):
        return None
    changes: list[Change] = [] if saves else [Set("save_state")]
    if not every and not t.opaque:
        changes.append(Set("save_every_n_epochs", ("1",)))
    if not every or "save_every_n_epochs" in every:
        changes += [] if t.has("save_last_n_epochs_state") else [Set("save_last_n_epochs_state", ("2",))]
    if "save_every_n_steps" in every and not t.has("save_last_n_steps_state"):
        interval = t.number("save_every_n_steps")
        changes += [Set("save_last_n_steps_state", (str(int(interval)),))] if interval else []
    return changes


def persistent_without_workers(t: Training) -> Mend:
    persistent = t.has("persistent_data_loader_workers") and t.number("max_data_loader_n_workers") == 0
    return [Drop("persistent_data_loader_workers")] if persistent else None


def many_workers(t: Training) -> Mend:
    workers = 8 if t.lacks("max_data_loader_n_workers") else t.number("max_data_loader_n_workers")
    return [Set("max_data_loader_n_workers", ("2",))] if workers is not None and workers > 2 else None


def windows_workers(t: Training) -> Mend:
    if t.language != "cmd":
        return None
    workers = 8 if t.lacks("max_data_loader_n_workers") else t.number("max_data_loader_n_workers")
    if not workers and not t.has("persistent_data_loader_workers"):
        return None
    return [Set("max_data_loader_n_workers", ("0",)), Drop("persistent_data_loader_workers")]


def _asked(t: Training, flag: str) -> bool:
    return t.has(flag) and t.number(flag) != 0


def sampling(t: Training) -> Mend:
    asked = any(_asked(t, f) for f in ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first"))
    return [Guard()] if asked and _unguarded(t) else None


def tracker(t: Training) -> Mend:
    return [Guard()] if t.text("log_with") in ("wandb", "all") and _unguarded(t) else None


def upload(t: Training) -> Mend:
    return [Guard()] if (t.has("huggingface_repo_id") or t.has("async_upload")) and _unguarded(t) else None


def resume(t: Training) -> Mend:
    return [Guard()] if t.has("resume") and _unguarded(t) else None


def unguarded(t: Training) -> Mend:
    return [Guard()] if _unguarded(t) else None


def cache_in_memory(t: Training) -> Mend:
    flags = ("cache_latents", "cache_text_encoder_outputs")
    if t.module == "trainer":
        return None  # it caches on disk whatever is said
    return [Set(f"{f}_to_disk") for f in flags if t.has(f) and t.lacks(f"{f}_to_disk")] or None


def network_place(path: str | None, t: Training) -> bool:
    """Whether a path is certainly on a network file system, by /proc/mounts or its UNC form."""
    if not path:
        return False
    if re.match(r"\\\\[^\\]|//[^/]", path):
        return True
    full = Path(path) if t.language == "cmd" else (t.base / path).absolute()
    kind, longest = "", -1
    for line in t.mounts.splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), parts[1])
        if (full == Path(point) or Path(point) in full.parents) and len(point) >= longest:
            kind, longest = parts[2], len(point)
    return kind in _table("lint.toml")["network_file_systems"]


def network_output(t: Training) -> Mend:
    wanted = t.text("output_dir")
    if not network_place(wanted, t):
        return None
    name = re.sub(r"[^\w-]+", "-", t.text("output_name") or file_name(wanted or "")).strip("-") or "run"
    return [Stage(f"/var/tmp/hangproof/{name}", wanted or "")] if t.language == "sh" else []


def network_data(t: Training) -> Mend:
    if not _unguarded(t):
        return None
    places = ("train_data_dir", "dataset_config", "reg_data_dir", "in_json", "conditioning_data_dir")
    return [Guard()] if any(network_place(t.text(p), t) for p in places) else None


def collective_timeout(t: Training) -> Mend:
    def above_one(option: str) -> bool:
        value = t.launch.get(option) or ""
        return value.isdigit() and int(value) > 1

    several = "multi_gpu" in t.launch or any(
        map(above_one, ("num_processes", "num_machines", "nproc_per_node", "nnodes"))
    )
    return [Set("ddp_timeout", ("60",))] if several and t.lacks("ddp_timeout") else None


# In the order they are mended: the specific ones first, so that a finding names its own reason.
CHECKS: dict[str, Callable[[Training], Mend]] = {
    "block-swap": block_swap,
    "split-mode": split_mode,
    "split-mode-conflict": split_mode_conflict,
    "fused-optimizer": fused_optimizer,
    "no-state": no_state,
    "persistent-without-workers": persistent_without_workers,
    "windows-workers": windows_workers,
    "many-workers": many_workers,
    "sampling": sampling,
    "tracker": tracker,
    "upload": upload,
    "resume": resume,
    "network-data": network_data,
    "unguarded": unguarded,
    "cache-in-memory": cache_in_memory,
    "network-output": network_output,
    "collective-timeout": collective_timeout,
}


def check(t: Training) -> list[tuple[str, list[Change]]]:
    """The ids of what is wrong with a training command, each with its changes."""
    found = [(name, changes) for name, rule in CHECKS.items() if (changes := rule(t)) is not None]
    windows = any(name == "windows-workers" for name, _ in found)
    return [(name, changes) for name, changes in found if not (windows and name == "many-workers")]


def lint(text: str, name: str = "train.sh", base: Path | None = None, mounts: str = "") -> list[Finding]:
    """All findings of a script, in the order of its commands."""
    rules = _table("lint.toml")["rules"]
    return [
        Finding(
            id=rule,
            level=rules[rule]["level"],
            line=text.count("\n", 0, _place(t, changes)) + 1,
            why=rules[rule]["why"],
            source=rules[rule]["source"],
            mend=rules[rule]["mend"],
            fixable=bool(changes),
        )
        for t in trainings(text, name, base, mounts)
        for rule, changes in check(t)
    ]


def _place(t: Training, changes: list[Change]) -> int:
    """Where in the source the finding is: the first flag to be changed that stands there, else the script's name."""
    for change in changes:
        known = t.flags.get(change.flag) if isinstance(change, Drop | Set) else None
        if known and known.words:
            return t.command.words[known.words[0]].start
    return t.command.words[t.script].start


def as_json(findings: list[Finding]) -> list[dict]:
    """Findings as plain values."""
    return [asdict(finding) for finding in findings]
