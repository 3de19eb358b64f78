"""Restores a run from its store: into an empty folder, or into one that is behind.

Everything is fetched to a hidden folder first, and each hash is compared. A manifest with a damaged or missing file is
passed over for the one before it. Then files and whole states are renamed into the run's folder. The newest state, or
`run.toml` of a new folder, comes last, so a restore that is killed is repeated, and keeps what it had fetched.

This machine's newer work wins: where its newest complete state is as far as the store's, nothing of the run is changed.
What is rendered from the run's job (the script, the data-set file) holds paths, so it is rendered again here.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomllib

from guards import checkpoint
from launch.store.copies import each_manifest
from launch.store.manifest import RENDERED, Manifest, Member, Memory, linked, newest_state, result_folders, state_of
from launch.store.places import Place, Refused, StoreError, Unavailable
from monitor.ledger import Ledger
from monitor.process.platform import Lock
from monitor.run_folder import STATUS, read_json
from runs.dataset import images_in
from runs.files import RunError, atomic_write, explained
from runs.paths import datasets_dir, outputs_dir
from runs.pictures import is_image_name
from runs.results import read_lora

SPEC, JOB, MONITOR = "run/run.toml", "run/job.json", "run/monitor.json"
FORGOTTEN = ("current", "failing", "shutdown")  # of monitor.json: processes and clocks of another machine
ENDED = ("completed", "failed", "stopped", "paused", "preempted")  # states of monitor.json that stay as they are
MAY_DIFFER = (  # fields of a spec that may differ between two copies of one run
    *("store", "price_per_hour", "spend_limit", "save_dir", "control_dir", "environment", "secrets"),
    *("epochs", "max_train_steps", "workers", "gpus", "nodes", "keep_states", "tier"),
)
SPEC_BYTES = 16 << 20  # job.json has an edited script twice


def restore(
    place: Place, run: str | Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> "Restored":
    """Bring the run's folder and data set up to the newest complete manifest of `place` (STORE/SLUG).

    run: the slug, or the run's folder. on_progress: called with the bytes fetched, and to fetch.

    Raises StoreError: the store cannot be read; the disk is full; the folder holds another run of this name, or another
    process restores it. RunError: this machine's folder cannot be written, or the script not be made here. The folder
    is unchanged, or, while files are renamed, still without its newest state, or `run.toml` where it had none.
    """
    folder = outputs_dir() / run
    lock = Lock(folder.with_name(f".restore-{folder.name}.lock"))
    with explained(f"restore {folder.name}"):
        if not lock.acquire():
            raise Unavailable(f"another process restores {folder.name} on this machine; wait until it has ended")
        try:
            return Restored(place, folder, on_progress).go()
        finally:
            with contextlib.suppress(OSError):  # while it is held, as others check it; Windows keeps the file
                lock.path.unlink()
            lock.release()


class Restored:
    """One restore, and what it did. `.restore-RUN` beside the run's folder has what was fetched, by its names there."""

    def __init__(self, place: Place, folder: Path, on_progress: Callable[[int, int], None]):
        self.place, self.run, self.folder, self.data = place, folder.name, folder, datasets_dir() / folder.name
        self.on_progress, self.staging = on_progress, folder.parent / f".restore-{folder.name}"
        self.memory = Memory(folder)
        self.manifest: Manifest | None = None  # None: the store has none that is complete
        self.step = -1  # of the newest state in the folder now; -1 without one
        self.files = self.fetched_bytes = 0  # that were written; that were fetched
        self.damaged: set[str] = set()  # SHA-256 of contents that the store holds damaged; for `Copier`
        self.notes: list[str] = []

    def go(self) -> "Restored":
        """See `restore`."""
        has_run = (self.folder / "run.toml").is_file()
        self.step = newest_state(self.folder, self.memory)
        self.manifest, wanted = self._fetch_newest(has_run)
        if self.manifest is None and self.notes and self.step < 0:
            what = f"{self.place.address} holds copies of this run, and none is complete ({self.notes[0]})"
            raise StoreError(f"{what}. Make the store right, or delete that folder there to start at step 0")
        if self.manifest is not None:
            if not has_run or self.manifest.step > self.step:  # else its files were not compared
                self.memory.synced = self.manifest.hashes()
            self._install(wanted, has_run)
            self.step = newest_state(self.folder, self.memory)
            with contextlib.suppress(OSError):
                self.memory.save(self.place.address)
            shutil.rmtree(self.staging, ignore_errors=True)
        return self

    # Choose and fetch ------------------------------------------------------------------------------------------------

    def _fetch_newest(self, has_run: bool) -> tuple[Manifest | None, dict[str, Member]]:
        """The newest manifest whose contents arrive undamaged, and its files that are to be written. The store is listed
        again for newer ones: a machine that trains meanwhile deletes those that were found."""
        tried = set[str]()
        while new := [one for one in each_manifest(self.place, self.run) if one[0] not in tried]:
            for name, manifest, why in new:
                tried.add(name)
                if manifest and not why:
                    try:
                        self._check_same_run(manifest, has_run)
                        wanted = self._wanted(manifest, has_run)
                        self._fetch(wanted)
                        self._check_states(manifest, wanted)
                        return manifest, wanted
                    except (Unavailable, Refused, _Conflict):
                        raise
                    except StoreError as error:
                        why = str(error)
                self.notes.append(why)
        return None, {}

    def _check_same_run(self, manifest: Manifest, has_run: bool) -> None:
        """Refuse to mix two runs of one name: a folder that never used this store, or shares no image with it (another
        machine may have emptied it and used the name), needs the same spec and, where images are here, the same ones."""
        differing, where = list[str](), self.folder / "run.toml"
        here = {f"data/{path.relative_to(self.data).as_posix()}" for path in images_in(self.data)}
        there = [name for name in manifest.files if name.startswith("data/") and is_image_name(Path(name))]
        same = [self._has(self._target(name), manifest.files[name]) for name in there]
        known = self.memory.store == self.place.address and (any(same) or not here or not there)
        if known or SPEC not in manifest.files:
            return
        if has_run:
            self._fetch({SPEC: manifest.files[SPEC]})
            own, stored = _read_toml(where), _read_toml(self.staging / SPEC)
            keys = (own.keys() | stored.keys()) - {*MAY_DIFFER}
            differing = sorted(key for key in keys if own.get(key) != stored.get(key))[:5]
        if not differing and here and not (here <= {*there} and all(same)):
            differing, where = ["the images"], self.data
        if differing:
            other = "make this run again under another name, use another store, or delete "
            fix = f"{other}{self.place.address}" if has_run else f"move {where} away"
            what = f"another run of this name: {', '.join(differing)} differ from {where}"
            raise _Conflict(f"{self.place.address} holds {what}; {fix}")

    def _wanted(self, manifest: Manifest, has_run: bool) -> dict[str, Member]:
        """The files of a manifest that this machine lacks; a state is wanted as a whole."""
        behind = not has_run or manifest.step > self.step
        parts = ("run/", "data/") if behind else () if self.data.is_dir() else ("data/",)
        wanted = {name: member for name, member in manifest.files.items() if name.startswith(parts)}
        left = {f"run/{name}" for name in RENDERED if SPEC in manifest.files}
        for state, names in manifest.states().items():
            if wanted and any(checkpoint.verify(where / state).usable for where in result_folders(self.folder)):
                left |= {*names}
        # what was edited here since
        left |= {name for name in wanted if name.startswith("data/") and self._is_newer(name, wanted[name])}
        if SPEC in wanted and self._is_newer(SPEC, wanted[SPEC]):
            left |= {SPEC, JOB} if (self.folder / "job.json").is_file() else {SPEC}
        return {
            name: member
            for name, member in wanted.items()
            if name not in left and (state_of(name) or not self._has(self._target(name), member))
        }

    def _has(self, path: Path, member: Member) -> bool:
        """Whether the file at `path` has these contents."""
        try:
            return self.memory.local(linked(path)).sha256 == member.sha256
        except OSError:
            return False

    def _is_newer(self, name: str, member: Member) -> bool:
        """Whether this machine's file was changed after the store's; by the clocks only where both were changed."""
        own, synced = self._target(name), self.memory.synced.get(name)
        if not own.is_file() or (synced and self._has(own, replace(member, sha256=synced))):
            return False
        return synced == member.sha256 or own.stat().st_mtime >= member.changed_s

    def _fetch(self, members: dict[str, Member]) -> None:
        """Fetch files to the staging folder; what an earlier restore fetched of them is kept.

        Raises StoreError: contents are damaged. Unavailable. OSError: this machine's disk.
        """
        self.staging.mkdir(exist_ok=True)
        todo = {name: member for name, member in members.items() if not self._has(self.staging / name, member)}
        total, done = sum(member.size for member in todo.values()), 0
        parts = [path for name in todo if (path := self.staging / name).is_file()]
        free = shutil.disk_usage(self.staging).free + sum(path.stat().st_size for path in parts)
        if total > free:
            raise _Conflict(
                f"{self.folder.parent} has {free / 1e6:.0f} MB free and the run needs {total / 1e6:.0f} MB; "
                f"free {(total - free) / 1e6:.0f} MB"
            )
        for name, member in todo.items():
            if name in (SPEC, JOB, MONITOR) and member.size > SPEC_BYTES:  # they are read as a whole
                raise StoreError(f"{self.place.address}: {name} has {member.size} bytes; put an intact copy there")
            self.on_progress(done, total)
            path = self.staging / name
            path.parent.mkdir(parents=True, exist_ok=True)

            def moved(count: int, before: int = done) -> None:
                self.on_progress(before + count, total)

            try:
                sha256 = self.place.get(member.blob, path, member.size, moved)
                if sha256 != member.sha256:  # perhaps it was added to a part of other contents
                    path.unlink()
                    sha256 = self.place.get(member.blob, path, member.size, moved)
            except OSError:  # a full disk: what follows, such as the reason, needs some of it
                path.unlink(missing_ok=True)
                raise
            if sha256 != member.sha256:
                path.unlink()
                self.damaged.add(member.sha256)
                raise StoreError(f"{self.place.address}/{member.blob} is damaged (another SHA-256); it is not used")
            os.utime(path, (time.time(), member.changed_s))
            checkpoint.fsync_path(path)
            done += member.size
            self.fetched_bytes += member.size
        self.on_progress(done, total)

    def _check_states(self, manifest: Manifest, wanted: dict[str, Member]) -> None:
        """Compare each fetched state with its guard file, after what an earlier restore left in it is gone."""
        for state, names in manifest.states().items():
            if not wanted.keys() & {*names}:
                continue
            folder = self.staging / "run" / state
            for path in checkpoint.files_below(folder, hidden=False):
                if f"run/{state}/{path.relative_to(folder).as_posix()}" not in names:
                    path.unlink()
            if problems := checkpoint.problems(folder):
                raise StoreError(f"{manifest.name}: {state} is not a complete state ({problems[0]}); it is not used")

    # Install ---------------------------------------------------------------------------------------------------------

    def _target(self, name: str) -> Path:
        """The path of a member. Its name was checked when the manifest was read."""
        where, _, path = name.partition("/")
        return (self.folder if where == "run" else self.data) / path

    def _install(self, wanted: dict[str, Member], has_run: bool) -> None:
        """Move what was fetched to its place. Last comes what says that it is done, so that one that is killed is
        repeated: the newest state where there is a run, else `run.toml`."""
        if not self.data.is_dir():
            self._install_data(wanted)
        for name in wanted:
            if not state_of(name) and name not in (SPEC, MONITOR) and (self.staging / name).exists():
                if name == f"run/{self.run}.safetensors":
                    self._keep_lora(self._target(name), self.staging / name)
                self._move(name)
        if MONITOR in wanted:
            self._leave_machine(self.staging / MONITOR)
            self._move(MONITOR)
        if SPEC in wanted or (wanted and has_run):
            self._render(SPEC in wanted, JOB in wanted)
        if SPEC in wanted and has_run:
            self._move(SPEC)
        states = {state_of(name) for name in wanted}
        for path in reversed(checkpoint.states(self.staging / "run")):  # the newest is the last
            if path.name in states:
                if (self.folder / path.name).exists():
                    checkpoint.set_aside(self.folder / path.name, "the store has a complete one of this name")
                self._move(f"run/{path.name}")
        if SPEC in wanted and not has_run:
            self._move(SPEC)
        self.files = len(wanted)
        checkpoint.fsync_path(self.folder.parent)

    def _keep_lora(self, own: Path, stored: Path) -> None:
        """Rename this machine's LoRA where it has more steps than the store's, whatever the manifest says."""
        here, there = (one.step or 0 if one else 0 for one in map(read_lora, (own, stored)))
        if here > there:
            own.replace(own.with_stem(f"{self.run}-step{here:08}"))

    def _install_data(self, wanted: dict[str, Member]) -> None:
        """Move the data set as a whole, because half of one would be trained."""
        fetched, aside = self.staging / "data", self.data.with_name(f".restore-{self.run}")
        for path in checkpoint.files_below(fetched, hidden=False):
            if path.relative_to(self.staging).as_posix() not in wanted:  # of an earlier restore
                path.unlink()
        if fetched.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(fetched, aside)  # on another disk it is copied
            aside.rename(self.data)
            checkpoint.fsync_path(self.data.parent)

    def _move(self, name: str) -> None:
        """Rename a fetched file or state into place; on another disk it is copied, and a kill repeats that."""
        target = self._target(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(self.staging / name, target)
        checkpoint.fsync_path(target.parent)

    def _leave_machine(self, path: Path) -> None:
        """Remove from monitor.json what was true on the other machine only: its processes, its clock, its local folder.
        What the run cost since it was written is in the status, which is copied more often."""
        values = read_json(path) or {}  # of a damaged one, the monitor says so
        with contextlib.suppress(StoreError, ValueError, AttributeError, RecursionError):
            known = Ledger.of(values), Ledger.of(json.loads(self.place.read(STATUS)))
            values["ledger"] = asdict(max(known, key=lambda one: one.wall_s))
        values |= {key: None for key in FORGOTTEN if key in values}
        values |= {"save_dir": ""} if "save_dir" in values else {}
        if values.get("state") not in ENDED:
            values["state"] = "opening"
        atomic_write(path, json.dumps(values, ensure_ascii=False, indent=1) + "\n")

    def _render(self, fetched_spec: bool, fetched_job: bool) -> None:
        """Write the script and the data-set file for this machine, from the run's job.

        A run of an earlier version has no job: it is made from the fetched `run.toml` or the folder's own. Raises
        RunError.
        """
        from runs.folders import render
        from runs.job import load
        from runs.pin import place

        source = self.staging / "run" if fetched_spec else self.folder
        self.folder.mkdir(exist_ok=True)
        try:
            job = load(self.folder)
        except RunError as error:
            first = f", once {source / 'run.toml'} is moved to {self.folder}" if fetched_spec else ""
            raise RunError(f"{error}{first}; then restore it again") from error
        if job is not None:
            place(self.folder, own_spec=fetched_job and not fetched_spec)
        else:
            render(self.folder, source)


class _Conflict(StoreError):
    """An earlier manifest would not help."""


def _read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as plain values; {} where it is missing or not valid."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
