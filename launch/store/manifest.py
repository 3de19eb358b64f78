"""What belongs to a run at one moment: names, sizes and SHA-256 of its files. A manifest is a file of the store.

Decision: the contents of files are stored under their SHA-256, so that what did not change is not sent again and equal
files are stored once. A manifest is written after everything it names. It is named `manifests/LEASE-NUMBER.json`; the
newest is the one with the highest lease, then the highest number. So a machine that lost the lease cannot replace what
its successor wrote, however late its write arrives.

Only complete states count: those whose guard file (guards/checkpoint.py) names every file with its hash. Hashes are
kept by size and time of change, so that no file is read twice. A manifest comes from another machine: its names must be
those of a run's files, and relative.
"""

import hashlib
import json
import os
import re
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guards import checkpoint
from launch.store.places import StoreError, one_line
from monitor.run_folder import read_json, read_spec
from runs.files import atomic_write

MANIFESTS, FILES = "manifests", "files"
NAME = re.compile(r"manifests/(\d{6,12})-(\d{6,12})\.json")
MEMORY = ".store-files.json"  # in the run's folder: hashes, and the store that the folder belongs to
LAST_S = 4e9  # Unix time; every file system can store it
RACE_S = 2.0  # a file that changed so recently may change again within the same tick of its clock

STATE = re.compile(r"run/([^/]+-state)/.+")
RUN_FILES = (  # of a run's folder, as regular expressions of relative paths; SLUG is its name
    r"(run|dataset)\.toml",
    r"sample_prompts\.txt",
    r"train\.(sh|bat)",
    r"job\.json",
    r"(events|metrics)\.jsonl",
    r"monitor\.json",
    r"incidents/\d{1,9}/.+",
    r"(sample|cache)/.+",
    r"SLUG(-step\d{6,12}|-\d{6})?\.safetensors",
    r"SLUG(-step\d{8}|-\d{6})?-state/.+",
)
# Restored by rendering the job on that machine.
RENDERED = ("dataset.toml", "sample_prompts.txt", "train.sh", "train.bat")


@dataclass(frozen=True)
class Member:
    """A file of a manifest: its contents, and when it was changed (Unix time)."""

    sha256: str
    size: int
    changed_s: float = 0.0

    @property
    def blob(self) -> str:
        """The name of its contents in the store."""
        return f"{FILES}/{self.sha256}"


@dataclass(frozen=True)
class Manifest:
    """What belongs to a run. `files`: names such as `run/events.jsonl` and `data/a.png`."""

    run: str
    lease: int
    number: int
    step: int  # of the newest state; -1 without one
    completed: bool
    owner: str  # who wrote it, for people
    written_at: str  # UTC
    files: dict[str, Member] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{MANIFESTS}/{self.lease:06}-{self.number:06}.json"

    @property
    def size(self) -> int:
        """The size of all its contents, each once."""
        return sum({member.sha256: member.size for member in self.files.values()}.values())

    def states(self) -> dict[str, list[str]]:
        """The names of its states' files, by state."""
        found: dict[str, list[str]] = {}
        for name in self.files:
            if state := state_of(name):
                found.setdefault(state, []).append(name)
        return found

    def hashes(self) -> dict[str, str]:
        """The SHA-256 of each file."""
        return {name: member.sha256 for name, member in self.files.items()}

    def dumps(self) -> bytes:
        """As JSON; the same manifest gives the same bytes."""
        rows = {name: [m.sha256, m.size, m.changed_s] for name, m in sorted(self.files.items())}
        return json.dumps({"version": 1, **vars(self), "files": rows}, ensure_ascii=False, indent=0).encode()


def state_of(name: str) -> str:
    """The state that a file of a manifest is part of; "" for none."""
    match = STATE.fullmatch(name)
    return match[1] if match else ""


def order_of(name: str) -> tuple[int, int] | None:
    """The lease and number in the name of a manifest; None for another name."""
    match = NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def parse(data: bytes, name: str, run: str) -> Manifest:
    """A manifest from the store.

    Raises StoreError: it is damaged, is that of another run, or names files that are none of a run.
    """
    try:
        values: dict[str, Any] = json.loads(data)
        files = {check_member(key, run): _member(*row) for key, row in values["files"].items()}
        lease, number = _count(values["lease"]), _count(values["number"])
        step, completed = max(-1, int(values["step"])), values["completed"] is True
        owner, written_at = one_line(values["owner"]), one_line(values["written_at"])
        manifest = Manifest(str(values["run"]), lease, number, step, completed, owner, written_at, files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"
        raise StoreError(f"{name}: the manifest is damaged ({why}); it is not used") from error
    if manifest.run != run or manifest.name != name:
        raise StoreError(f"{name}: the manifest belongs to {manifest.run!r} {manifest.name}; it is not used")
    return manifest


def check_member(name: str, run: str) -> str:
    """The name, if it is that of a run's file or of its data set: relative, nothing hidden, no way out of the folder.

    Raises ValueError: anything else.
    """
    where, _, path = name.partition("/")
    parts = path.split("/")
    printable = re.sub(r"[\xa0\u202f]", " ", name).isprintable()  # macOS writes such spaces into names of screenshots
    plain = len(name) <= 500 and printable and not set(name) & set('\\:*?"<>|')
    if not plain or len(parts) > 8 or any(not part or part[0] in ". " or part[-1] in ". " for part in parts):
        raise ValueError(f"{name[:200]!r} is not the name of a file of a run")
    if where == "data" or (where == "run" and belongs(path, run)):
        return name
    raise ValueError(f"{name[:200]!r} is not a file that a run has")


def belongs(path: str, run: str) -> bool:
    """Whether a path relative to a run's folder is one that is copied."""
    return any(re.fullmatch(pattern.replace("SLUG", re.escape(run)), path) for pattern in RUN_FILES)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 10**15:
        raise ValueError(f"{value!r} is not a number of bytes or a count")
    return value


def _member(sha256: str, size: object, changed_s: float) -> Member:
    """A row of a manifest; the time of a file may be before 1970, or nonsense. Raises ValueError, TypeError."""
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"{sha256[:100]!r} is not a SHA-256")
    return Member(sha256, _count(size), min(max(0.0, float(changed_s)), LAST_S))


# This machine's files -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local(Member):
    """A file of this machine. `key` changes when its contents are replaced: size, mtime_ns, inode."""

    path: Path = Path()
    key: tuple[int, int, int] = (0, 0, 0)

    def is_unchanged(self) -> bool:
        """Whether the file is still the one that was hashed. Raises OSError."""
        return key_of(os.lstat(self.path)) == self.key


def key_of(status: os.stat_result) -> tuple[int, int, int]:
    """What tells a file from the one that it replaces: size, mtime_ns, inode."""
    return status.st_size, status.st_mtime_ns, status.st_ino


class Memory:
    """SHA-256 by size, time and inode, and what the store had of the run (`.store-files.json` in the run's folder)."""

    def __init__(self, folder: Path):
        self.path = folder / MEMORY
        values = read_json(self.path) or {}
        known, synced = (one if isinstance(one, dict) else {} for one in map(values.get, ("files", "synced")))
        self.store = str(values.get("store") or "")  # the address that the folder was pushed to or restored from
        self._known: dict[str, list[Any]] = known
        self.synced: dict[str, str] = synced  # SHA-256 of what this machine and the store had last, by name

    def local(self, path: Path) -> Local:
        """The file with its hash; read only when it has changed. Raises OSError, also for a link or a special file."""
        for _ in range(3):
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{path}: a link or a special file; it is not copied")
            key, row = key_of(status), self._known.get(str(path))
            if row is not None and tuple(row[:3]) == key:
                return Local(str(row[3]), key[0], key[1] / 1e9, path, key)
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()
            if key_of(os.lstat(path)) == key and size == key[0]:
                if abs(time.time() - status.st_mtime) > RACE_S:
                    self._known[str(path)] = [*key, sha256]
                return Local(sha256, size, key[1] / 1e9, path, key)
        raise OSError(f"{path}: it changes while it is read")

    def save(self, store: str) -> None:
        """Keep the hashes of the files that are still there, and the store's address. Raises OSError."""
        self.store, self._known = store, {name: row for name, row in self._known.items() if os.path.exists(name)}
        atomic_write(self.path, json.dumps({"store": store, "files": self._known, "synced": self.synced}))


@dataclass
class Item:
    """What is copied as a whole or not at all: a state, or one other file. `files`: by their names in a manifest."""

    files: dict[str, Local]
    state: str = ""
    step: int = -1  # of a state

    def order(self) -> tuple[int, int]:
        """What is sent first: small files, which grow, then LoRA files, then states."""
        kind = 2 if self.state else int(next(iter(self.files)).endswith(".safetensors"))
        return kind, sum(local.size for local in self.files.values())


class Contents:
    """What this machine has of a run, what was left out and why, and what a push sent of it."""

    def __init__(self, run: str, memory: Memory):
        self.run, self.memory = run, memory
        self.items: list[Item] = []
        self.completed = False
        self.notes: list[str] = []
        self.unread: list[str] = []  # how the names of what cannot be read now begin
        self.sent_files = 0
        self.manifest: Manifest | None = None  # that was written; None where nothing had changed since the last one

    @property
    def files(self) -> dict[str, Local]:
        """All files by their names in a manifest."""
        return {name: local for item in self.items for name, local in item.files.items()}

    @property
    def step(self) -> int:
        """The step of the newest state; -1 without one."""
        return max((item.step for item in self.items), default=-1)

    def read(self, paths: dict[str, Path]) -> dict[str, Local]:
        """The files with their hashes; {} where one vanished, or cannot be copied, which is noted."""
        try:
            return {check_member(name, self.run): self.memory.local(path) for name, path in paths.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self.leave_out(error, *paths)
            return {}

    def leave_out(self, error: Exception, *names: str) -> None:
        """Note what cannot be copied now. A folder that is gone may be on a drive that is gone."""
        self.unread += names
        if not isinstance(error, FileNotFoundError):
            self.notes.append(f"not copied: {error}; rename or fix the file")

    def kept_of(self, last: Manifest) -> dict[str, Member]:
        """What an older copy has of what cannot be read now, such as images on a network drive that is gone."""
        unread = tuple(self.unread)
        return {name: one for name, one in last.files.items() if name.startswith(unread) and not state_of(name)}

    def add_state(self, state: Path) -> None:
        """Add a state if every file has the size and hash that its guard file names."""
        guard = checkpoint.guard_of(state)
        if guard is None or any(item.state == state.name for item in self.items):
            return  # it is being written, or never was completed; or it is in both folders
        rows, top = guard["files"], f"run/{state.name}"
        files = self.read({f"{top}/{name}": state / name for name in (*rows, checkpoint.GUARD)})
        if not files or checkpoint.guard_of(state) != guard:
            return  # deleted or replaced meanwhile
        for name, row in rows.items():
            local = files[f"{top}/{name}"]
            if (local.size, local.sha256) != (row["size"], row["sha256"]):
                self.notes.append(f"{state.name}: {name} is not as it was written; the state is not copied")
                return
        self.items.append(Item(files, state.name, int(guard["step"])))


def contents(folder: Path, data: Path, memory: Memory) -> Contents:
    """The files of the run in `folder` and of its data set in `data`. Files that vanish meanwhile are left out."""
    found = Contents(folder.name, memory)
    found.completed = (read_json(folder / "monitor.json") or {}).get("state") == "completed"
    paths = {f"data/{path.relative_to(data).as_posix()}": linked(path) for path in _files(found, data, "data/")}
    for where in reversed(result_folders(folder)):
        paths |= {f"run/{path.name}": path for path in where.glob("*.safetensors") if belongs(path.name, folder.name)}
        try:
            for state in checkpoint.states(where, folder.name):
                found.add_state(state)
        except OSError as error:
            found.notes.append(f"{where}: its states cannot be listed: {error.strerror or error}")
    for path in _files(found, folder, "run/"):
        name = path.relative_to(folder).as_posix()
        if belongs(name, folder.name) and not state_of(f"run/{name}"):
            paths[f"run/{name}"] = path
    for name, path in paths.items():
        if files := found.read({name: path}):
            found.items.append(Item(files))
    return found


def _files(found: Contents, folder: Path, where: str) -> list[Path]:
    return checkpoint.files_below(folder, False, lambda error: found.leave_out(error, where))


def linked(path: Path) -> Path:
    """The path, or that which a link of a data set leads to: the training reads it, so a copy of the run needs it."""
    return path.resolve() if path.is_symlink() else path


def result_folders(folder: Path) -> list[Path]:
    """Where the states and the LoRA of the run in `folder` are: there, and where its attempt (after a mitigation), or
    its spec, writes them first."""
    known = (read_json(folder / "monitor.json") or {}, read_spec(folder))
    return [folder, *(Path(text) for text in dict.fromkeys(str(one.get("save_dir") or "") for one in known) if text)]


def newest_state(folder: Path, memory: Memory) -> int:
    """The step of the newest complete state of the run in `folder`; -1 without one. Raises OSError."""
    newest = -1
    for where in result_folders(folder):
        found = Contents(folder.name, memory)
        for state, step in checkpoint.states(where, folder.name).items():
            if step > newest and not found.items:
                found.add_state(state)
        newest = max(newest, found.step)
    return newest
