"""Lint for training scripts: finds what is known to hang or fail. Rules are data (lint.toml), checks are pure functions.

A check examines one training command. It returns None when nothing is wrong, otherwise the changes that fix it (an empty
list when only a person can). A fix never changes what is learned: no learning rate, step count, data or precision.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from presets.disks import is_network
from presets.tables import _table
from presets.training import Training, file_name, trainings


@dataclass(frozen=True)
class Change:
    """One change of a script.

    kind: "Drop" removes a flag; "Set" gives it these values, or adds it; "Guard" starts the script with the guarded
    launcher; "Newlines" replaces Windows line endings; "Unmark" removes the byte order mark.
    """

    kind: str
    flag: str = ""
    values: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One line for a user: what it does to the script."""
        others = {
            "Drop": f"removed --{self.flag}",
            "Guard": "the script is started with -m sd_scripts_patches",
            "Unmark": "removed the byte order mark",
            "Newlines": "the line endings are Unix line endings (LF)",
        }
        return others.get(self.kind) or f"set {' '.join((f'--{self.flag}', *self.values))}"


Fix = list[Change] | None
GUARD = Change("Guard")


def _drop(*flags: str) -> list[Change]:
    return [Change("Drop", flag) for flag in flags]


def _set(flag: str, *values: str) -> Change:
    return Change("Set", flag, values)


@dataclass(frozen=True)
class Finding:
    """One problem: which rule, where, why it is a problem, and how to fix it."""

    id: str
    level: str
    line: int
    why: str
    source: str
    fix: str
    fixable: bool


def trains_single_blocks(t: Training) -> bool:
    """Whether only FLUX's single blocks get a LoRA, and the input layers (in_dims) get none."""
    words = [v or "" for v in (t.flags["network_args"].values if t.has("network_args") else [])]
    last = [w.partition("=")[2] for w in words if w.startswith("train_blocks=")][-1:]
    return last == ["single"] and not any(w.startswith("in_dims=") for w in words)


def is_flux(t: Training) -> bool:
    """Whether the command trains a LoRA of FLUX, the only family with a split mode."""
    return t.module == "trainer" or file_name(t.command.words[t.script].shape) == "flux_train_network.py"


def block_swap(t: Training) -> Fix:
    bounded = file_name(t.command.words[t.script].shape) in _table("lint.toml")["guarded_scripts"]  # by the guards
    if bounded or not t.has("blocks_to_swap") or t.number("blocks_to_swap") == 0:
        return None
    saves_memory = is_flux(t) and trains_single_blocks(t) and not t.has("split_mode")
    return [*_drop("blocks_to_swap"), *([_set("split_mode")] if saves_memory else [])]


def split_mode(t: Training) -> Fix:
    if not t.has("split_mode") or t.module:
        return None
    return [GUARD] if trains_single_blocks(t) else _drop("split_mode")


def split_mode_conflict(t: Training) -> Fix:
    if not t.has("split_mode") or not t.module:
        return None
    if not trains_single_blocks(t):
        return None if t.opaque else _drop("split_mode")
    return _drop("cpu_offload_checkpointing") if t.has("cpu_offload_checkpointing") else None


def fused_optimizer(t: Training) -> Fix:
    flags = ("blockwise_fused_optimizers", "fused_backward_pass", "fused_optimizer_groups")
    return _drop(*filter(t.has, flags)) or None


def no_state(t: Training) -> Fix:
    saves = t.has("save_state") or t.opaque
    every = [f for f in ("save_every_n_epochs", "save_every_n_steps", "save_n_epoch_ratio") if t.has(f)]
    if saves and (every or t.opaque):
        return None
    changes: list[Change] = [] if saves else [_set("save_state")]
    if not every and not t.opaque:
        changes.append(_set("save_every_n_epochs", "1"))
    if not every or "save_every_n_epochs" in every:
        changes += [] if t.has("save_last_n_epochs_state") else [_set("save_last_n_epochs_state", "2")]
    if "save_every_n_steps" in every and not t.has("save_last_n_steps_state"):
        interval = t.number("save_every_n_steps")
        changes += [_set("save_last_n_steps_state", str(int(interval)))] if interval else []
    return changes


def _workers(t: Training) -> float | None:
    """The number of loader workers; None where it is not known."""
    return 8 if t.lacks("max_data_loader_n_workers") else t.number("max_data_loader_n_workers")


def many_workers(t: Training) -> Fix:
    workers = _workers(t) if t.language == "sh" else None
    return [_set("max_data_loader_n_workers", "2")] if workers is not None and workers > 2 else None


def windows_workers(t: Training) -> Fix:
    if t.language == "sh" or not (_workers(t) or t.has("persistent_data_loader_workers")):
        return None
    return [_set("max_data_loader_n_workers", "0"), *_drop("persistent_data_loader_workers")]


def cache_in_memory(t: Training) -> Fix:
    flags = ("cache_latents", "cache_text_encoder_outputs")
    if t.module == "trainer":
        return None  # it always caches on disk
    return [_set(f"{f}_to_disk") for f in flags if t.has(f) and t.lacks(f"{f}_to_disk")] or None


def network_disk(t: Training) -> Fix:
    """The guards bound each read; what is being saved to a disk that stops answering is lost all the same."""
    paths = (
        ("output_dir",) if t.module else ("output_dir", "train_data_dir", "reg_data_dir", "dataset_config", "in_json")
    )
    return [] if any(is_network(t.base.absolute() / (t.text(flag) or "")) for flag in paths if t.text(flag)) else None


def _when(holds: Callable[[Training], bool], *changes: Change) -> Callable[[Training], Fix]:
    """A rule that always has the same changes; without any, only a person can fix it."""
    return lambda t: list(changes) if holds(t) else None


# In the order in which they are fixed: specific rules first, so that each finding names its own reason.
CHECKS: dict[str, Callable[[Training], Fix]] = {
    "line-endings": _when(lambda t: t.language == "sh" and "\r\n" in t.source, Change("Newlines")),
    "byte-order-mark": _when(lambda t: t.language != "ps" and t.source.startswith("\ufeff"), Change("Unmark")),
    "cut-off": _when(lambda t: t.cut_at is not None),
    "block-swap": block_swap,
    "split-mode": split_mode,
    "split-mode-conflict": split_mode_conflict,
    "fused-optimizer": fused_optimizer,
    "no-state": no_state,
    "persistent-without-workers": _when(
        lambda t: t.has("persistent_data_loader_workers") and t.number("max_data_loader_n_workers") == 0,
        *_drop("persistent_data_loader_workers"),
    ),
    "windows-workers": windows_workers,
    "many-workers": many_workers,
    "unguarded": _when(lambda t: not t.module, GUARD),
    "cache-in-memory": cache_in_memory,
    "network-disk": network_disk,
}


def check(t: Training) -> list[tuple[str, list[Change]]]:
    """The rules that a training command breaks, each with the changes that fix it."""
    return [(name, changes) for name, rule in CHECKS.items() if (changes := rule(t)) is not None]


def lint(text: str, name: str = "train.sh", base: Path | None = None) -> list[Finding]:
    """All findings in a script, in the order of its commands.

    Args: as presets.training.trainings.
    """
    return [
        Finding(
            id=rule,
            line=text.count("\n", 0, _position(t, rule, changes)) + 1,
            fixable=bool(changes) and t.language != "ps",
            **_table("lint.toml")["rules"][rule],
        )
        for t in trainings(text, name, base)
        for rule, changes in check(t)
    ]


def _position(t: Training, rule: str, changes: list[Change]) -> int:
    """Where a finding is in the script's text: at the first written flag that it is about, else at the script's name."""
    if rule == "cut-off" and t.cut_at is not None:
        return t.cut_at
    for change in changes:
        known = t.flags.get(change.flag)
        if known and known.words:
            return t.command.words[known.words[0]].start
    return t.command.words[t.script].start
