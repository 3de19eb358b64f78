"""What a node without a shared disk needs from the leader: the spec, the data set, the state to resume from.

Decision: by content. The leader lists name, size and SHA-256 of each file; the node copies what it lacks, continues a
file that was cut, checks the hash, and gives a state its name when it is complete. A data set on the node that the leader
does not have is never changed: the node says what differs and stops. Model files are not copied; each machine has its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from guards import checkpoint
from monitor.nodes import wire
from monitor.run_folder import JOB, SCRIPT, MonitorError, RunFolder

RUN, DATA, STATE = "run", "dataset", "state"  # the first part of a name
CACHES = (".npz",)  # made anew where they are missing, and not the same bytes on every machine
COPIED = ".hangproof-copied"  # in a data set that a node has copied: it may be changed to match the leader's
MAX_FILES = 200_000
MAX_BYTES = 1 << 42
CHUNK = 1 << 20
Fetch = Callable[[str, int, Path], None]  # (name, offset, path): append the file's bytes from `offset` on to `path`


class CopyError(Exception):
    """A copy that did not succeed; it may at the next try. The message names the file."""


@dataclass(frozen=True)
class Entry:
    """A file that a node may need. path: on the leader."""

    path: Path
    size: int
    sha256: str


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_folder(run: Path) -> Path:
    """The run's data set."""
    from runs.paths import datasets_dir

    return datasets_dir() / run.name


class Catalogue:
    """The leader's list of files. A file is hashed once, until its size or time changes."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.known: dict[str, Entry] = {}
        self._hashes: dict[tuple[str, int, int], str] = {}

    def entries(self, resume: str, resume_path: str) -> list[list[Any]]:
        """[name, size, sha256] of every file, for the state `resume` at `resume_path`. OSError: one cannot be read."""
        found: dict[str, Entry] = {}
        for name, path in self._paths(resume, resume_path):
            with contextlib.suppress(FileNotFoundError):  # it was replaced meanwhile; the node asks again
                found[name] = self._entry(path)
        self.known = {**self.known, **found}
        return [[name, entry.size, entry.sha256] for name, entry in found.items()]

    def _entry(self, path: Path) -> Entry:
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        if key not in self._hashes:
            self._hashes[key] = _hash(path)
        return Entry(path, stat.st_size, self._hashes[key])

    def _paths(self, resume: str, resume_path: str) -> Iterator[tuple[str, Path]]:
        run = self.folder.folder
        for name in (SCRIPT,) if self.folder.foreign else ("run.toml", JOB):
            if (run / name).is_file():
                yield f"{RUN}/{name}", run / name
        data = data_folder(run)
        for path in _files(data) if not self.folder.foreign else ():
            yield f"{DATA}/{path.relative_to(data).as_posix()}", path
        if resume:
            state = Path(resume_path)
            for path in sorted(p for p in state.rglob("*") if p.is_file()):
                yield f"{STATE}/{resume}/{path.relative_to(state).as_posix()}", path


def _files(data: Path) -> list[Path]:
    """The files of a data set, without caches and hidden files; caches beside the images are files of it."""
    if not data.is_dir():
        return []
    found = (path for path in sorted(data.rglob("*")) if path.is_file() and not path.is_symlink())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(data).parts)]


def listed(values: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """name -> (size, sha256) of the leader's answer. WireError: a name could leave its folder, or something is too large."""
    rows = values.get("files")
    if not isinstance(rows, list) or len(rows) > MAX_FILES:
        raise wire.WireError("the list of files is not a list, or too long")
    found = {}
    for row in rows:
        name, size, digest = row if isinstance(row, list) and len(row) == 3 else (None, None, None)
        if (
            not isinstance(name, str)
            or type(size) is not int
            or not 0 <= size <= MAX_BYTES
            or not isinstance(digest, str)
        ):
            raise wire.WireError(f"{str(row)[:80]} is not a file")
        found[safe(name)] = (size, digest)
    return found


def safe(name: str) -> str:
    """The name, when it stays inside its folder on every system. WireError: it does not."""
    parts = name.split("/")
    wrong = not all(parts) or any(part in (".", "..") or set(part) & set("\\:\0") for part in parts)
    if wrong or parts[0] not in (RUN, DATA, STATE) or len(parts) < 2 or len(name) > 1000:
        raise wire.WireError(f"{name[:80]!r} is not the name of a file of the run")
    if parts[0] == RUN and parts[1:] not in ([SCRIPT], ["run.toml"], [JOB]):
        raise wire.WireError(f"{name[:80]!r} is not a file that a node needs")
    return name


class Copier:
    """Copies to a node what it lacks. `progress` is called with a sentence."""

    def __init__(self, folder: RunFolder, fetch: Fetch, progress: Callable[[str], None]):
        self.folder, self._fetch, self._progress = folder, fetch, progress

    def copy(self, wanted: dict[str, tuple[int, str]], resume: str) -> None:
        """Make this machine's run folder, data set and state the leader's.

        CopyError: try again. MonitorError: a person must act. OSError: a disk.
        """
        run = self.folder.folder
        self._each({n: v for n, v in wanted.items() if n.startswith(f"{RUN}/")}, run, f"{RUN}/")
        self._data({n.removeprefix(f"{DATA}/"): v for n, v in wanted.items() if n.startswith(f"{DATA}/")})
        if resume:
            prefix = f"{STATE}/{resume}/"
            self._state({n: v for n, v in wanted.items() if n.startswith(prefix)}, prefix, run / resume)

    def _data(self, wanted: dict[str, tuple[int, str]]) -> None:
        if not wanted:
            return
        data = data_folder(self.folder.folder)
        ours = (data / COPIED).exists() or not data.exists()
        present = {path.relative_to(data).as_posix(): path for path in _files(data)}
        different = [name for name, path in present.items() if not _cache(name) and not _same(path, wanted.get(name))]
        if different and not ours:
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise MonitorError(
                f"the data set {data} differs from the leader's: {different[0]}{more}; move it away, and it is copied from "
                "the leader, or make both the same"
            )
        data.mkdir(parents=True, exist_ok=True)
        if ours:
            (data / COPIED).touch()
            for name in different:
                (data / name).unlink(missing_ok=True)
        self._each({f"{DATA}/{n}": v for n, v in wanted.items() if not (_cache(n) and n in present)}, data, f"{DATA}/")

    def _state(self, wanted: dict[str, tuple[int, str]], prefix: str, final: Path) -> None:
        if f"{prefix}{checkpoint.GUARD}" not in wanted:
            raise CopyError(f"{final.name}: the leader does not list its guard file")
        if final.is_dir() and all(_same(final / n.removeprefix(prefix), v) for n, v in wanted.items()):
            return
        part = final.with_name(f".{final.name}.node.part")
        self._each(wanted, part, prefix)
        if final.exists():
            shutil.rmtree(final)
        os.replace(part, final)
        checkpoint.fsync_path(final.parent)

    def _each(self, wanted: dict[str, tuple[int, str]], target: Path, prefix: str) -> None:
        """Copy the files whose content differs into `target`."""
        for number, (name, (size, digest)) in enumerate(wanted.items(), 1):
            path = target / name.removeprefix(prefix)
            if _same(path, (size, digest)):
                continue
            self._progress(f"copies {name}, {number} of {len(wanted)}, {size / 1e6:.1f} MB, from the leader")
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.resolve() != (target.resolve() / path.relative_to(target)).parent:
                raise MonitorError(f"{path.parent} is a link to another folder; remove it")
            part = path.with_name(f".{path.name}.{digest[:12]}.part")
            have = part.stat().st_size if part.exists() else 0
            if have > size:
                part.unlink()
                have = 0
            if have < size or not part.exists():
                self._fetch(name, have, part)
            if part.stat().st_size != size or _hash(part) != digest:
                part.unlink(missing_ok=True)
                raise CopyError(f"{name}: what arrived is not what the leader listed")
            checkpoint.fsync_path(part)
            os.replace(part, path)


def is_state(name: str) -> bool:
    """Whether this is the name of a state's folder, and of nothing else."""
    return name.endswith("-state") and not name.startswith(".") and not set(name) & set("/\\:\0")


def _cache(name: str) -> bool:
    return PurePosixPath(name).suffix in CACHES


def _same(path: Path, expected: tuple[int, str] | None) -> bool:
    """The file is there with this size and hash."""
    try:
        return expected is not None and path.stat().st_size == expected[0] and _hash(path) == expected[1]
    except OSError:
        return False
