"""Restores a run from its store: into an empty folder, or into one that is behind.

Everything is fetched to a hidden folder first, and each hash is compared. A manifest with a damaged or missing file is
passed over for the one before it. Then the files are renamed into the run's folder, `run.toml` last: a folder without
it is no run, so a restore that is killed is simply repeated, and keeps what it had fetched.

This machine's newer work wins: where its newest complete state is as far as the store's, nothing of the run is changed.
What is rendered from the run's job (the script, the data-set file) holds paths, so it is rendered again for this machine.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomllib

from guards import checkpoint
from launch.store.copies import each_manifest, manifest_names
from launch.store.manifest import FILES, RENDERED, Manifest, Member, Memory, newest_state
from launch.store.places import Place, StoreError, Unavailable
from monitor.run_folder import read_json
from runs.files import atomic_write, explained, fsync_folder
from runs.paths import datasets_dir, outputs_dir

SPEC, JOB = "run/run.toml", "run/job.json"
MONITOR = "run/monitor.json"
FORGOTTEN = (
    "current",
    "failure",
    "shutdown",
)  # of monitor.json: processes and clocks of another machine
ENDED = ("completed", "failed", "stopped", "paused", "preempted")  # states of monitor.json that stay as they are
MAY_DIFFER = (  # fields of a spec that may differ between two copies of one run
    *("store", "price_per_hour", "spend_limit", "save_dir", "control_dir", "environment", "secrets"),
    *("epochs", "max_train_steps", "workers", "gpus", "nodes", "keep_states", "tier"),
)
SPEC_BYTES = 1 << 20


def restore(
    place: Place,
    run: str,
    folder: Path | None = None,
    data: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> "Restored":
    """Bring the run's folder and data set up to the newest complete manifest of `place` (STORE/SLUG).

    Args:
        run: the slug. folder, data: by default those of the run on this machine.
        on_progress: called with the bytes fetched and the bytes to fetch.

    Raises StoreError: the store cannot be read; the disk is full; the folder holds another run of this name. RunError:
    this machine's folder cannot be written, or the script not be made here. The run's folder is unchanged, or, while
    its last files are renamed, still without `run.toml` where it had none.
    """
    folder, data = folder or outputs_dir() / run, data or datasets_dir() / run
    with explained(f"restore {run}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        found = Restored(place, run, folder, data, on_progress)
        found.go()
        return found


class Restored:
    """One restore, and what it did. The fetched contents are in `staging` under their SHA-256."""

    def __init__(self, place: Place, run: str, folder: Path, data: Path, on_progress: Callable[[int, int], None]):
        self.place, self.run, self.folder, self.data = place, run, folder, data
        self.on_progress = on_progress
        self.staging = folder.parent / f".restore-{run}"
        self.memory = Memory(folder)
        self.manifest: Manifest | None = None  # None: the store has none that is complete
        self.step = -1  # of the newest state in the folder now; -1 without one
        self.files = self.fetched_bytes = 0  # that were written; that were fetched
        self.damaged: set[str] = set()  # SHA-256 of contents that the store holds damaged; for `Copier`
        self.notes: list[str] = []
        self.uses = Counter[str]()  # of fetched contents, by SHA-256

    def go(self) -> None:
        """See `restore`."""
        has_run = (self.folder / "run.toml").is_file()
        self.step = newest_state(self.folder, self.memory)
        self.manifest, members = self._fetch_newest(has_run)
        if self.manifest is None:
            return
        self._install(self.manifest, members)
        self.step = newest_state(self.folder, self.memory)
        with contextlib.suppress(OSError):
            self.memory.save(self.place.address)
        shutil.rmtree(self.staging, ignore_errors=True)

    # Choose and fetch -----------------------------------------------------------------------------------------------

    def _fetch_newest(self, has_run: bool) -> tuple[Manifest | None, dict[str, Member]]:
        """The newest manifest whose contents arrive undamaged, and its files that are to be written."""
        names = manifest_names(self.place)
        files = self.place.list(FILES) if names else {}
        for _, manifest, why in each_manifest(self.place, self.run, names, files):
            if manifest and not why:
                try:
                    self._check_same_run(manifest, has_run)
                    members = self._wanted(manifest, has_run)
                    self._fetch(members)
                    return manifest, members
                except (Unavailable, _Conflict):
                    raise
                except StoreError as error:
                    why = str(error)
            self.notes.append(f"{why}; the manifest before it is used")
        return None, {}

    def _check_same_run(self, manifest: Manifest, has_run: bool) -> None:
        """Refuse to mix two runs of one name: a folder that never used this store must have the same spec."""
        if not has_run or self.memory.store == self.place.address or SPEC not in manifest.files:
            return
        member = manifest.files[SPEC]
        if member.size > SPEC_BYTES:
            raise StoreError(f"{manifest.name}: its run.toml has {member.size} bytes; it is not used")
        self._fetch({SPEC: member})
        own, stored = _read_toml(self.folder / "run.toml"), _read_toml(self._staged(member))
        keys = (own.keys() | stored.keys()) - {*MAY_DIFFER}
        if differing := sorted(key for key in keys if own.get(key) != stored.get(key)):
            raise _Conflict(
                f"{self.place.address} holds another run of this name: {', '.join(differing[:5])} differ from "
                f"{self.folder / 'run.toml'}; rename this run, use another store, or delete {self.place.address}"
            )

    def _wanted(self, manifest: Manifest, has_run: bool) -> dict[str, Member]:
        """The files of a manifest that this machine lacks."""
        behind = not has_run or manifest.step > self.step
        parts = ("run/", "data/") if behind else () if self.data.is_dir() else ("data/",)
        wanted = {name: member for name, member in manifest.files.items() if name.startswith(parts)}
        left = {f"run/{name}" for name in RENDERED if SPEC in manifest.files}
        for state, names in manifest.states().items():
            if wanted and checkpoint.verify(self.folder / state).usable:
                left |= {*names}
        own = self.folder / "run.toml"
        if has_run and SPEC in wanted and own.stat().st_mtime >= wanted[SPEC].changed_s:  # it was edited here
            left |= {SPEC, JOB} if (self.folder / "job.json").is_file() else {SPEC}
        return {
            name: member
            for name, member in wanted.items()
            if name not in left and not self._has(self._target(name), member)
        }

    def _has(self, path: Path, member: Member) -> bool:
        """Whether the file at `path` has these contents."""
        try:
            return self.memory.local(path).sha256 == member.sha256
        except OSError:
            return False

    def _fetch(self, members: dict[str, Member]) -> None:
        """Fetch contents to the staging folder; those that an earlier restore fetched are kept.

        Raises StoreError: contents are damaged. Unavailable. OSError: this machine's disk.
        """
        self.staging.mkdir(exist_ok=True)
        todo = {m.sha256: m for m in members.values() if not self._has(self._staged(m), m)}
        total, done = sum(m.size for m in todo.values()), 0
        free = shutil.disk_usage(self.staging).free
        if total > free:
            raise _Conflict(
                f"{self.staging.parent} has {free / 1e6:.0f} MB free and the run needs {total / 1e6:.0f} MB; "
                f"free {(total - free) / 1e6:.0f} MB"
            )
        for member in todo.values():
            self.on_progress(done, total)
            path, digest = self._staged(member), hashlib.sha256()
            try:
                self.place.get(member.blob, path, member.size, digest.update)
                if digest.hexdigest() != member.sha256:
                    self.damaged.add(member.sha256)
                    raise StoreError(
                        f"{self.place.address}/{member.blob} is damaged: its contents do not have this SHA-256"
                    )
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            checkpoint.fsync_path(path)
            done += member.size
            self.fetched_bytes += member.size
        self.on_progress(done, total)

    def _staged(self, member: Member) -> Path:
        return self.staging / member.sha256

    # Install --------------------------------------------------------------------------------------------------------

    def _target(self, name: str) -> Path:
        """The path of a member. Its name was checked when the manifest was read."""
        where, _, path = name.partition("/")
        return (self.folder if where == "run" else self.data) / path

    def _install(self, manifest: Manifest, members: dict[str, Member]) -> None:
        """Rename the fetched files to their places: data and logs, states as whole folders, what is rendered, `run.toml`."""
        self.uses.update(member.sha256 for member in manifest.files.values())
        states = {name: state for state, names in manifest.states().items() for name in names if name in members}
        for name in members:
            if name not in states and name not in (SPEC, MONITOR):
                self._write(self._target(name), members[name])
        for state in sorted(set(states.values())):
            self._install_state(state, manifest)
        if MONITOR in members:
            self._write(self._target(MONITOR), members[MONITOR])
            _forget_processes(self._target(MONITOR))
        if SPEC in members:
            self._render(members[SPEC], JOB in members)
            self._write(self._target(SPEC), members[SPEC])
        elif members and (self.folder / "run.toml").is_file():
            self._render(None, JOB in members)
        fsync_folder(self.folder.parent)

    def _install_state(self, state: str, manifest: Manifest) -> None:
        """Build a state beside its place and rename it: a killed restore leaves a hidden folder, which the trainer removes."""
        final = self.folder / state
        temporary = self.folder / f".{state}.{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        for name in manifest.states()[state]:
            member = manifest.files[name]
            relative = name.removeprefix(f"run/{state}/")
            if self._has(self._staged(member), member):
                self._write(temporary / relative, member)
            else:  # it was here already, with this hash
                (temporary / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(final / relative, temporary / relative)
        if problems := checkpoint.problems(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            raise StoreError(f"{manifest.name}: {state} is not a complete state: {problems[0]}")
        if final.exists():
            checkpoint.set_aside(final, "the store has a complete one of this name")
        os.replace(temporary, final)
        fsync_folder(self.folder)

    def _write(self, target: Path, member: Member) -> None:
        """Put fetched contents at `target`: complete, on the disk, with their time of change.

        They are linked, or copied where several files have them or links are not possible.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        staged, temporary = self._staged(member), target.with_name(f".{member.sha256}.tmp")
        temporary.unlink(missing_ok=True)
        linked = False
        if self.uses[member.sha256] == 1:
            with contextlib.suppress(OSError):
                os.link(staged, temporary)
                linked = True
        if not linked:
            shutil.copyfile(staged, temporary)
        os.utime(temporary, (time.time(), member.changed_s))
        checkpoint.fsync_path(temporary)
        os.replace(temporary, target)
        fsync_folder(target.parent)
        self.files += 1

    def _render(self, member: Member | None, fetched_job: bool) -> None:
        """Write the script and the data-set file for this machine, from the run's job.

        A run of an earlier version has no job: it is made from the fetched `run.toml` or the folder's own. Raises
        RunError.
        """
        from runs.folders import render
        from runs.job import FILE
        from runs.pin import place
        from runs.spec import load

        source = self.folder
        if member is not None:
            source = self.staging / "spec"
            source.mkdir(exist_ok=True)
            shutil.copyfile(self._staged(member), source / "run.toml")
        self.folder.mkdir(exist_ok=True)
        if (self.folder / FILE).is_file():
            place(self.folder, own_spec=fetched_job and member is None)
        else:
            render(self.folder, load(source), (source / "run.toml").read_bytes())


class _Conflict(StoreError):
    """An earlier manifest would not help."""


def _read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as plain values; {} where it is missing or not valid."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}


def _forget_processes(path: Path) -> None:
    """Remove from monitor.json what was true on the other machine only: its processes and its clock."""
    values = read_json(path)
    if values is None:
        path.unlink(missing_ok=True)
        return
    values |= {key: None for key in FORGOTTEN if key in values}
    if values.get("state") not in ENDED:
        values["state"] = "opening"
    atomic_write(path, json.dumps(values, ensure_ascii=False, indent=1) + "\n")
