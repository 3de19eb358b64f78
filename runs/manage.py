"""Deletes and renames runs. Neither leaves half a run when it is interrupted.

A deletion first renames the run to a hidden name, in which it is decided: what is left of it is removed by the next one.
A rename first hides the run's folder with a note of what is to be done, so that nothing starts a run that is half renamed;
`finish_interrupted` completes it, and the page calls that whenever it sees such a folder. LoRA files, states and samples
get the new name, because the trainers find their states by it and the LoRA of a run has the run's name.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runs import env_file, staging
from runs.files import RunError, atomic_write, checksum, explained, fsync_folder
from runs.paths import datasets_dir, outputs_dir, run_folder, slug

if TYPE_CHECKING:
    from runs.spec import RunSpec

TRASH = ".trash-"  # then 8 random characters, KEEPS or TAKES, and the run's folder name
KEEPS, TAKES = "-", "+"  # its images. No folder name of a run has a "+", so no name of a run reads as an order
RENAMING = ".rename-"  # then 8 random characters
NOTE = ".rename.json"
BUSY = threading.Lock()
"""Held while this process renames a run, so that nobody takes its hidden folder for that of an interrupted rename."""
Idle = Callable[[Path], AbstractContextManager[bool]]
"""Keeps a monitor from starting for the run of a folder; False when one watches it, or when its training is alive.

The caller passes the monitor's `process.tree.idle`: only the monitor knows who is alive, and this folder does not import it.
"""
ARTIFACT = r"((?:-step\d{6,}|-\d{6})?(?:\.safetensors|-state)(?:\.bad.*)?)"


@dataclass(frozen=True)
class Usage:
    """What a run takes on the disk, in bytes, and how many images its data set has."""

    run_bytes: int
    images_bytes: int
    images: int


def size_text(size: float) -> str:
    """A file size for people: `2.5 MB`, `1.2 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor * 0.9995:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"


def usage(name: str | Path) -> Usage:
    """What deleting a run frees.

    Raises:
        RunError: there is no such run, or it is outside the folder of runs.
    """
    from runs.dataset import images_in

    folder = _own_folder(name)
    data = datasets_dir() / folder.name
    return Usage(_size(folder), _size(data), len(images_in(data)) if data.is_dir() else 0)


def _size(folder: Path) -> int:
    """The bytes that deleting a folder frees: not those of files that another run of its sweep has too."""
    total = 0
    for where, _, names in os.walk(folder):  # does not enter links
        for name in names:
            with contextlib.suppress(OSError):
                about = os.lstat(os.path.join(where, name))
                total += about.st_size if about.st_nlink < 2 else 0
    return total


def _own_folder(name: str | Path) -> Path:
    """The folder of a run, directly in the folder of runs and no link."""
    folder = run_folder(name)
    if folder.parent.resolve() != outputs_dir().resolve() or folder.name.startswith("."):
        raise RunError(f"{folder} is not in {outputs_dir()}; delete or rename it by hand")
    return _no_link(outputs_dir() / folder.name)


def _no_link(path: Path) -> Path:
    if path.is_symlink() or (hasattr(path, "is_junction") and path.is_junction()):
        raise RunError(f"{path} is a link to another folder; delete or rename it by hand")
    return path


@contextlib.contextmanager
def _stopped(folder: Path, idle: Idle) -> Iterator[None]:
    """Keep a monitor from starting for the run. RunError when it is not idle."""
    with idle(folder) as free:
        if not free:
            raise RunError(f"{folder.name} is running; stop it first: python -m monitor stop {folder.name}")
        yield


# Delete ---------------------------------------------------------------------------------------------------------------


def delete(name: str | Path, idle: Idle, images: bool = False) -> int:
    """Delete a run and, with `images`, its data set. Returns the bytes that were freed.

    Raises:
        RunError: the run is alive, is a link, or is outside the folder of runs; or a file cannot be deleted.
    """
    folder = _own_folder(name)
    data = datasets_dir() / folder.name
    images = images and data.is_dir()
    if images:
        _no_link(data)
    freed = _size(folder) + (_size(data) if images else 0)
    trash = outputs_dir() / f"{TRASH}{secrets.token_hex(4)}{TAKES if images else KEEPS}{folder.name}"
    with explained(f"delete {folder.name}"):
        with _stopped(folder, idle):
            os.rename(folder, trash)
        env_file.forget(folder)
        staging.sweep()
        fsync_folder(outputs_dir())
        _remove_trash(trash)
    empty_trash()
    return freed


def empty_trash() -> None:
    """Complete the deletions that were interrupted."""
    for place in (outputs_dir(), datasets_dir()):
        for trash in place.glob(f"{TRASH}*"):
            with contextlib.suppress(OSError):  # tried again by the next deletion
                _remove_trash(trash)


def _remove_trash(trash: Path) -> None:
    """Remove a folder of the trash and, where its name says so, the data set of its run. OSError: something is left."""
    order = re.fullmatch(rf"{re.escape(TRASH)}[0-9a-f]{{8}}{re.escape(TAKES)}(.+)", trash.name)
    data = datasets_dir() / order[1] if order and trash.parent == outputs_dir() else None
    if data and data.is_dir() and not data.is_symlink() and not (outputs_dir() / data.name).exists():
        gone = datasets_dir() / trash.name
        os.rename(data, gone)
        fsync_folder(datasets_dir())
        _remove_folder(gone)
    _remove_folder(trash)


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process removes it too
        shutil.rmtree(folder)


# Rename ---------------------------------------------------------------------------------------------------------------


def rename(name: str | Path, new_name: str, idle: Idle) -> Path:
    """Rename a run: its folder, data set, script, LoRA files, states and samples. Returns the new folder.

    Raises:
        RunError: the run is alive, the name is taken or makes no folder name, or `run.toml` is invalid. Nothing changed then.
    """
    from runs.flags import check_extra
    from runs.pin import pinned
    from runs.spec import load

    folder = _own_folder(name)
    spec = load(folder).changed(name=new_name.strip())
    check_extra(spec)
    for place in (outputs_dir(), datasets_dir()):
        _check_free(place, spec.slug, folder.name)
        _no_link(place / folder.name)
    with BUSY, explained(f"rename {folder.name}"):
        with _stopped(folder, idle):
            pinned(folder)
            if spec.slug == folder.name:
                _write_files(folder, folder, spec, folder.name)
                return folder
            hidden = outputs_dir() / f"{RENAMING}{secrets.token_hex(4)}"
            note = {"old": folder.name, "new": spec.slug, "name": spec.name}
            atomic_write(folder / NOTE, json.dumps(note))
            os.rename(folder, hidden)
            fsync_folder(outputs_dir())
            return _finish(hidden)


def _check_free(place: Path, new: str, old: str) -> None:
    """RunError when another run or data set has this name. `A` and `a` are one name: Windows and macOS know no case."""
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    taken = next((n for n in names if n.casefold() == new.casefold() and n != old), None)
    if taken is not None:
        what = "run" if place == outputs_dir() else "data set"
        raise RunError(f"a {what} named {taken} exists already in {place}; choose another name")


def finish_interrupted(idle: Idle) -> list[Path]:
    """Complete the renames that were interrupted. Returns the runs' folders."""
    done = []
    for hidden in outputs_dir().glob(f"{RENAMING}*"):
        with contextlib.suppress(OSError, RunError), idle(hidden) as free:
            if free:  # else another process is at it: that one completes it, or the next call does
                done.append(_finish(hidden))
    return done


def _finish(hidden: Path) -> Path:
    """Complete a rename. Each step can be repeated; the last one shows the run again."""
    from runs.spec import load

    note = json.loads((hidden / NOTE).read_text(encoding="utf-8"))
    old, new, name = note["old"], slug(note["name"]), note["name"]
    final = outputs_dir() / new
    if final.exists():  # somebody made a run of this name meanwhile: back to the old name
        old, new, name = new, old, load(hidden).name if slug(load(hidden).name) == old else old
        final = outputs_dir() / new
    _rename_artifacts(hidden, old, new)
    data, new_data = datasets_dir() / old, datasets_dir() / new
    if data.is_dir() and not data.is_symlink() and (not new_data.exists() or data.samefile(new_data)):
        os.rename(data, new_data)
        fsync_folder(datasets_dir())
    env_file.move(outputs_dir() / old, final)
    for script in hidden.glob("train.attempt-*"):  # of earlier attempts, with the old paths
        script.unlink()
    _write_files(hidden, final, load(hidden).changed(name=name), old)
    os.rename(hidden, final)
    fsync_folder(outputs_dir())
    (final / NOTE).unlink(missing_ok=True)
    return final


def _rename_artifacts(folder: Path, old: str, new: str) -> None:
    patterns = {folder: re.escape(old) + ARTIFACT, folder / "sample": re.escape(old) + r"(_.*\d{8,}.*)"}
    for place, pattern in patterns.items():
        for path in list(place.iterdir()) if place.is_dir() else []:
            match = re.fullmatch(pattern, path.name)
            if match and not (place / f"{new}{match[1]}").exists():
                os.rename(path, place / f"{new}{match[1]}")


def _write_files(work: Path, final: Path, spec: "RunSpec", old: str) -> None:
    """Write the run's job under its new name, the name and paths in the monitor's files, and `run.toml` last."""
    from runs import job as jobs
    from runs import pin
    from runs.spec import dumps, load, save

    old_text, new_text = (work / "run.toml").read_bytes(), dumps(spec).encode()
    hashes = _hashes(old_text, new_text)
    job = jobs.load(work) or jobs.made(jobs.resolve(load(work), outputs_dir() / old), old_text)
    job = jobs.moved(jobs.renamed(job, spec.name), jobs.places(final, final.name))
    marks = {name: hashes.get(getattr(job, name), getattr(job, name)) for name in ("digest", "run_toml")}
    pin.write(work, dataclasses.replace(job, **marks))
    artifact = re.compile(rf"(?<![\w-]){re.escape(old)}((?:-step\d{{6,}}|-\d{{6}})?(?:\.safetensors|-state))")
    for file in ("status.json", "monitor.json"):
        if values := _values(work / file):
            changed = _changed(values, final, spec.name, hashes, lambda text: artifact.sub(rf"{final.name}\1", text))
            atomic_write(work / file, json.dumps(changed, ensure_ascii=False, indent=1) + "\n")
    save(work, spec, final)


def settle(folder: Path, spec: "RunSpec") -> None:
    """Move the secrets that an earlier version, or a person, wrote into the files of a run; the rest of each file stays.

    A run that is being renamed or fetched is not touched, and a disk that cannot be written stays as it is.
    """
    from runs.spec import dumps, save

    if any(part.startswith(".") for part in folder.absolute().parts[-2:]):
        return
    with contextlib.suppress(OSError, RunError):
        scripts = {
            path: env_file.of_script(path.read_text(encoding="utf-8")) for path in folder.glob("train*.[sb][ha]*")
        }
        for _, found in scripts.values():
            spec = env_file.with_values(spec, {k: v for k, v in found.items() if k not in spec.environment})
        env_file.keep(folder, spec)  # first, so that a script that reads the file finds it
        for path, (text, _) in scripts.items():
            lines = (env_file.batch_lines if path.suffix == ".bat" else env_file.bash_lines)(spec.secrets, folder)
            atomic_write(path, env_file.with_lines(text, lines), executable=True)
        hashes = _hashes((folder / "run.toml").read_bytes(), dumps(spec).encode())
        for file in ("status.json", "monitor.json"):
            values = _values(folder / file)
            if (known := hashes.get(str(values.get("spec_hash")))) is not None:
                atomic_write(
                    folder / file, json.dumps({**values, "spec_hash": known}, ensure_ascii=False, indent=1) + "\n"
                )
        save(folder, spec)


def _values(path: Path) -> dict[str, Any]:
    """A file of the monitor; {} where the run was never started, or the file is broken, which the monitor reports."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _hashes(old_text: bytes, new_text: bytes) -> dict[str, str]:
    """The checksum of a changed `run.toml` by the one that a file of the monitor may hold."""
    # The second is a SHA-256 in files of versions before November 2026.
    return {checksum(old_text): checksum(new_text), hashlib.sha256(old_text).hexdigest(): checksum(new_text)}


def _changed(
    values: dict[str, Any], final: Path, name: str, hashes: dict[str, str], renamed: Callable[[str], str]
) -> dict[str, Any]:
    """`status.json` or `monitor.json` of the renamed run. A completed run stays completed: its spec's hash is kept up."""
    out = {key: renamed(v) if key in ("message", "reason") and isinstance(v, str) else v for key, v in values.items()}
    if (known := hashes.get(str(values.get("spec_hash")))) is not None:
        out["spec_hash"] = known
    out |= {key: value for key, value in (("name", name), ("folder", str(final))) if key in values}
    checkpoint = values.get("checkpoint")
    if isinstance(checkpoint, dict) and isinstance(checkpoint.get("path"), str):
        out["checkpoint"] = checkpoint | {"path": str(final / renamed(Path(checkpoint["path"]).name))}
    if values.get("lora"):
        out["lora"] = str(final / f"{final.name}.safetensors")
    return out
