"""Lint for training scripts: finds what is known to hang or fail. What a rule says is data (lint.toml).

A check yields the rules that one training command breaks, each with the changes that fix it; none where only a person
can. A fix never changes what is learned: no learning rate, step count, data or precision.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from presets.tables import read_table
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


NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|ceph|lustre|gpfs|beegfs|glusterfs|afs|fuse\.(?!fuseblk|lxcfs|gvfsd)\S+", re.I
)
Broken = Iterator[tuple[str, list[Change]]]
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


def check(t: Training) -> dict[str, list[Change]]:
    """The rules that a training command breaks, each with the changes that fix it.

    Specific rules come first, here and in lint.toml, whose order is that of the fixes: so each names its own reason.
    """
    return dict([*_of_the_text(t), *_of_the_memory(t), *_of_states_and_workers(t), *_of_the_files(t)])


def _of_the_text(t: Training) -> Broken:
    if t.language == "sh" and "\r\n" in t.source:
        yield "line-endings", [Change("Newlines")]
    if t.language != "ps" and t.source.startswith("\ufeff"):
        yield "byte-order-mark", [Change("Unmark")]
    if t.cut_at is not None:
        yield "cut-off", []


def _of_the_memory(t: Training) -> Broken:
    """Block swap, split mode (only FLUX has one) and optimizers in backward hooks."""
    script = file_name(t.command.words[t.script].shape)
    # The input layers (in_dims) get no LoRA, and of FLUX's blocks only the single ones get one.
    words = [value or "" for value in (t.flags["network_args"].values if t.has("network_args") else [])]
    blocks = [word.partition("=")[2] for word in words if word.startswith("train_blocks=")][-1:]
    single = blocks == ["single"] and not any(word.startswith("in_dims=") for word in words)
    split = t.has("split_mode")
    bounded = script in read_table("lint.toml")["guarded_scripts"]  # by the guards
    if t.has("blocks_to_swap") and t.number("blocks_to_swap") != 0 and not bounded:
        saves_as_much = single and not split and (t.module == "trainer" or script == "flux_train_network.py")
        yield "block-swap", [*_drop("blocks_to_swap"), *([_set("split_mode")] if saves_as_much else [])]
    if split and not t.module:
        yield "split-mode", [GUARD] if single else _drop("split_mode")
    elif split and single and t.has("cpu_offload_checkpointing"):
        yield "split-mode-conflict", _drop("cpu_offload_checkpointing")
    elif split and not single and not t.opaque:
        yield "split-mode-conflict", _drop("split_mode")
    if fused := _those(t, "blockwise_fused_optimizers", "fused_backward_pass", "fused_optimizer_groups"):
        yield "fused-optimizer", _drop(*fused)


def _those(t: Training, *flags: str) -> list[str]:
    return [flag for flag in flags if t.has(flag)]


def _of_states_and_workers(t: Training) -> Broken:
    every = _those(t, "save_every_n_epochs", "save_every_n_steps", "save_n_epoch_ratio")
    if not t.opaque and not (every and t.has("save_state")):
        missing = [] if t.has("save_state") else [_set("save_state")]
        missing += [] if every else [_set("save_every_n_epochs", "1")]
        if (not every or "save_every_n_epochs" in every) and not t.has("save_last_n_epochs_state"):
            missing.append(_set("save_last_n_epochs_state", "2"))
        steps = t.number("save_every_n_steps")
        if steps and not t.has("save_last_n_steps_state"):
            missing.append(_set("save_last_n_steps_state", str(int(steps))))
        yield "no-state", missing
    persistent = _drop(*_those(t, "persistent_data_loader_workers"))
    workers = 8 if t.lacks("max_data_loader_n_workers") else t.number("max_data_loader_n_workers")
    if persistent and workers == 0:
        yield "persistent-without-workers", persistent
    if t.language != "sh" and (workers or persistent):
        yield "windows-workers", [_set("max_data_loader_n_workers", "0"), *_drop("persistent_data_loader_workers")]
    if t.language == "sh" and workers is not None and workers > 2:
        yield "many-workers", [_set("max_data_loader_n_workers", "2")]


def _of_the_files(t: Training) -> Broken:
    """Waits for files; the guards bound each read, but what is being saved to a disk that stops answering is lost."""
    if not t.module:
        yield "unguarded", [GUARD]
    cached = _those(t, "cache_latents", "cache_text_encoder_outputs")
    in_memory = [_set(f"{flag}_to_disk") for flag in cached if t.lacks(f"{flag}_to_disk")]
    if in_memory and t.module != "trainer":  # which always caches on disk
        yield "cache-in-memory", in_memory
    read = [] if t.module else ["train_data_dir", "reg_data_dir", "dataset_config", "in_json"]
    paths = [path for flag in ("output_dir", *read) if (path := t.text(flag))]
    if any(NETWORK.fullmatch(file_system(t.base.absolute() / path)[0]) for path in paths):
        yield "network-disk", []


def file_system(path: Path) -> tuple[str, str]:
    """(kind, mount point) of the file system of an absolute path, from the table of mounts; ("", "") where it has none.

    On one of a network, a read or a write can wait without limit: the path itself is not looked at.
    """
    import psutil

    place = Path(os.path.normpath(path))
    inside = [disk for disk in psutil.disk_partitions(all=True) if place.is_relative_to(disk.mountpoint)]
    # Of two at one place, the later is on top.
    disk = max(reversed(inside), key=lambda one: len(one.mountpoint), default=None)
    return (disk.fstype, disk.mountpoint) if disk else ("", "")


def lint(text: str, name: str = "train.sh", base: Path | None = None) -> list[Finding]:
    """All findings in a script, in the order of its commands.

    Args: as presets.training.trainings.
    """
    return [
        Finding(
            id=rule,
            line=text.count("\n", 0, _position(t, rule, changes)) + 1,
            fixable=bool(changes) and t.language != "ps",
            **read_table("lint.toml")["rules"][rule],
        )
        for t in trainings(text, name, base)
        for rule, changes in check(t).items()
    ]


def _position(t: Training, rule: str, changes: list[Change]) -> int:
    """Where a finding is in the text: at the first written flag that it is about, else at the script's name."""
    if rule == "cut-off" and t.cut_at is not None:
        return t.cut_at
    written = [t.flags[one.flag].words for one in changes if one.flag in t.flags]
    return t.command.words[next((words[0] for words in written if words), t.script)].start
