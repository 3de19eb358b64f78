"""State folders that count only when they are complete.

Decision: a state is written into a temporary folder beside its final place. Every file is fsynced, a guard file with
the size and checksum of each file is written last, and the folder is renamed into place. `accelerate.save_state` writes
in place, so a kill during the save leaves a state that looks complete; here it leaves a temporary folder that nobody
resumes from. safetensors refuses a truncated file, but zeroed data and NaN load without an error: hence the hashes and
the deep check.

"Bad" and "cannot be verified" are different answers (VerifyResult): a disk that does not read, or a broken torch,
proves nothing about a state. And the folder may change under a reader: the trainer renames and deletes states.

Names are sd-scripts': `{name}-step00000020-state`, `{name}-000003-state`, `{name}-state`. Standard library only; the
deep check of an optimizer imports torch, so the monitor runs it as a command: `python -m guards.checkpoint verify
FOLDER [--deep] [--json]`, `… verify-lora FILE [--json]`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from guards import file_contents
from guards.reading import json_object, read_bytes

GUARD = "hangproof.json"
VERSION = 1
DIGESTS = ("sha256", "crc32")
PIECE_BYTES = 32 << 20  # 11 s of a disk that writes 3 MB a second
_WAIT_WRITE_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_*, linux/fs.h
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_NUMBER = r"(-step\d{8}|-\d{6})?"
_LEFT = r"(-state\.\d+\.(?P<state>tmp|old|gone)|\.safetensors\.\d+\.tmp|(_\d{6}_.+)?\.\d+\.tmp\.\w+)"
_OUTSIDE = re.compile(r"^[/\\]|\.\.|[:\0\ud800-\udc7f\udd00-\udfff]")  # in no name of a state's file


def fsync_path(path: Path) -> None:
    """Make a file's content, or the renames in a folder, survive a power cut. Raises OSError."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return  # Windows cannot open a folder; its rename is durable on its own terms
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        _write_back(descriptor)
        os.fsync(descriptor)
    except OSError as error:  # some network and FUSE file systems sync no folder (PostgreSQL's fsync_fname_ext, too)
        if error.errno not in (errno.EINVAL, errno.EBADF) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _write_back(descriptor: int) -> None:
    """Write a large file to the disk piece by piece, where Linux can: the fsync that follows is then short.

    A byte is read after each piece, which moves the counter that shows others this thread's progress (state_saves.py);
    an fsync of gigabytes moves none. Raises OSError.
    """
    size = os.fstat(descriptor).st_size
    if sys.platform != "linux" or size <= PIECE_BYTES:
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for at in range(0, size, PIECE_BYTES):
        if libc.sync_file_range(descriptor, ctypes.c_int64(at), ctypes.c_int64(PIECE_BYTES), _WAIT_WRITE_WAIT):
            number = ctypes.get_errno()
            if number in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
                return  # not on this system, or not for such a file
            raise OSError(number, os.strerror(number), f"/proc/self/fd/{descriptor}")
        os.pread(descriptor, 1, at)


def rename(old: Path, new: Path, sync: bool = True) -> None:
    """Give a file or folder another name; `sync`: to survive a power cut. Raises OSError.

    Windows renames nothing that another program has open, such as a virus scanner: it is tried again for a second.
    """
    for tries_left in reversed(range(50 if sys.platform == "win32" else 1)):
        try:
            os.replace(old, new)
            break
        except PermissionError:
            if not tries_left:
                raise
            time.sleep(0.02)
    if sync:
        fsync_path(new.parent)


@contextlib.contextmanager
def writing_file(final: str | os.PathLike[str], sync: bool = True, temporary: Path | None = None) -> Iterator[Path]:
    """A temporary path beside `final` for a writer; on success it is renamed, else removed. Raises OSError.

    sync: the file survives a power cut. temporary: another path.
    """
    final = Path(final)
    temporary = temporary or final.with_name(f".{final.stem}.{os.getpid()}.tmp{final.suffix}")
    try:
        yield temporary
        if sync:
            fsync_path(temporary)
        rename(temporary, final, sync)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def atomic_write(path: str | os.PathLike[str], data: bytes | str, sync: bool = True) -> None:
    """Replace `path` with `data` (text as UTF-8), completely or not at all; `sync`: to survive a power cut. OSError."""
    path = Path(path)
    with writing_file(path, sync, path.with_name(f".{path.name}.{os.getpid()}.tmp")) as temporary:
        temporary.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)


def append_text(path: str | os.PathLike[str], text: str) -> None:
    """Append a line in a single write, on a line of its own even where the one before was cut off. Raises OSError."""
    data = (text + "\n").encode("utf-8", "replace")  # a path that is not UTF-8 holds surrogates
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
    try:
        if os.lseek(descriptor, 0, os.SEEK_END):
            os.lseek(descriptor, -1, os.SEEK_END)
            if os.read(descriptor, 1) != b"\n":
                data = b"\n" + data
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
    finally:
        os.close(descriptor)


def append_line(path: str | os.PathLike[str], record: Mapping[str, object]) -> None:
    """Append one JSON line. NaN and infinity, which JSON lacks, become null. Raises OSError."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    append_text(path, _encode(clean))


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def files_below(folder: Path, hidden: bool = True, unread: Callable[[OSError], None] = _raise) -> list[Path]:
    """The files below a folder, sorted; [] where it is missing. Links to folders are not followed.

    unread: called with the error of a folder that cannot be listed, where `rglob` passes over its files; by default it
    is raised.
    """
    found = []
    for where, folders, names in os.walk(folder, onerror=unread):
        folders[:] = [name for name in folders if hidden or name[0] != "."]
        found += [Path(where, name) for name in names if hidden or name[0] != "."]
    return sorted(found)


def _digest(path: Path, kind: str) -> str:
    """The checksum of a file, one of DIGESTS."""
    digest, check = None, 0
    if kind == "sha256":
        import hashlib  # 4 MB of memory that the monitor does not need: snapshots have a CRC-32

        digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            if digest is not None:
                digest.update(chunk)
            else:
                check = zlib.crc32(chunk, check)
    return str(check) if digest is None else digest.hexdigest()


def write_guard(
    folder: str | os.PathLike[str],
    step: int,
    epoch: int,
    in_memory: Mapping[str, tuple[int, int]] | None = None,
    **extra: object,
) -> None:
    """fsync every file of `folder`, then write its guard file: the mark of a complete state. Raises OSError.

    in_memory: (bytes, CRC-32) of each file. For a folder that is gone after a power cut, and gets its name after this.
    """
    files = {name: {"size": size, "crc32": str(check)} for name, (size, check) in (in_memory or {}).items()}
    if in_memory is None:
        for path in [path for path in files_below(Path(folder)) if path.name != GUARD]:
            fsync_path(path)
            name = path.relative_to(folder).as_posix()
            files[name] = {"size": path.stat().st_size, "sha256": _digest(path, "sha256")}
    guard = json.dumps({"version": VERSION, "step": step, "epoch": epoch, **extra, "files": files})
    if in_memory is None:
        return atomic_write(Path(folder) / GUARD, guard)
    with open(f"{folder}/{GUARD}", "wb", buffering=0) as file:  # a rename and a Path would cost as much as the writing
        file.write(guard.encode())


@contextlib.contextmanager
def writing(final: str | os.PathLike[str], step: int, epoch: int, **extra: Any) -> Iterator[Path]:
    """Write a state: yields an empty temporary folder, which gets its guard file and the name `final` on success.

    step, epoch: the completed ones. They go into the guard file, with the JSON values of `extra`. An existing state of
    that name is replaced only when the new one is complete; an error or a kill does not change it. Raises OSError.
    """
    final = Path(final)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        write_guard(temporary, step, epoch, None, **extra)
        old = temporary.with_suffix(".old")
        if final.exists():
            rename(final, old, sync=False)
        rename(temporary, final)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def guard_of(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The content of the guard file; None when it is missing, cannot be read or is not valid. Never raises."""
    try:
        return _parse_guard(read_bytes(Path(folder) / GUARD))
    except OSError:
        return None


def _parse_guard(data: bytes) -> dict[str, Any] | None:
    guard = json_object(data) or {}
    valid = (
        isinstance(guard.get("step"), int)
        and isinstance(guard.get("files"), dict)
        and not any(map(_OUTSIDE.search, guard["files"]))
        and all(
            isinstance(e, dict) and "size" in e and not e.keys().isdisjoint(DIGESTS) for e in guard["files"].values()
        )
    )
    return guard if valid else None


@dataclass(frozen=True)
class VerifyResult:
    """What a verification found. A state is bad only if `problems` is not empty."""

    problems: tuple[str, ...] = ()  # damage that was seen
    error: str = ""  # why the state could not be verified at all: nothing is known about it

    @property
    def usable(self) -> bool:
        """Every hash matched and no check found damage."""
        return not self.problems and not self.error


def verify(folder: str | os.PathLike[str], deep: bool = False) -> VerifyResult:
    """Compare a state with its guard file. Never raises OSError: what cannot be read is in `error`.

    deep: also check that the weights are finite, and that the optimizer's file, if there is one, loads (imports torch).
    Where that cannot be checked, `error` says why.
    """
    folder = Path(folder)
    try:
        data = read_bytes(folder / GUARD)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.isdir(folder):
            return VerifyResult((f"{folder.name}: it has no guard file ({GUARD}), so the save did not complete",))
        return VerifyResult(error=f"{folder}: no such folder")
    except OSError as error:
        return VerifyResult(error=_cannot_read(folder, error))
    guard = _parse_guard(data)
    if guard is None:
        return VerifyResult((f"{folder.name}: its guard file ({GUARD}) is damaged",))
    problems, errors = _compare(folder, guard["files"])
    if problems or errors:
        # The trainer may have replaced or deleted the state meanwhile; then these findings mean nothing.
        try:
            changed = (folder / GUARD).read_bytes() != data
        except OSError:
            changed = True
        if changed and not errors:
            return VerifyResult(error=f"{folder.name}: it was replaced or deleted during the verification")
        return VerifyResult(tuple(problems), error="" if problems else errors[0])
    for name in guard["files"] if deep else ():
        try:
            problems += filter(None, [file_contents.damage(folder / name)])
        except (OSError, MemoryError, ImportError) as error:
            errors.append(f"{folder / name}: its content cannot be checked: {error or 'out of memory'}")
    return VerifyResult(tuple(problems), error="" if problems or not errors else errors[0])


def problems(folder: str | os.PathLike[str], deep: bool = False) -> list[str]:
    """The damage that `verify` finds in a state, and the reason if it cannot be verified; [] when it can be used."""
    result = verify(folder, deep)
    return [*result.problems, *([result.error] if result.error else [])]


def _compare(folder: Path, files: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """(damage, what could not be read) of the files of a state."""
    problems, errors = [], []
    for name, expected in files.items():
        path, kind = folder / name, next(kind for kind in DIGESTS if kind in expected)
        try:
            size = os.stat(path).st_size
            if size != expected["size"]:
                problems.append(f"{name}: truncated: {size} bytes instead of {expected['size']}")
            elif _digest(path, kind) != expected[kind]:
                problems.append(f"{name}: its content has changed since it was written (wrong checksum)")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            problems.append(f"{name}: missing")
        except OSError as error:
            errors.append(_cannot_read(path, error))
    return problems, errors


def _cannot_read(path: Path, error: OSError) -> str:
    return f"{path}: cannot read it: {error.strerror or error}"


def verify_lora(path: str | os.PathLike[str]) -> VerifyResult:
    """Is `path` a complete safetensors file with finite numbers? Never raises OSError: see `error` of the result."""
    path = Path(path)
    try:
        damage = file_contents.tensor_damage(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return VerifyResult((f"{path}: no such file",))
    except OSError as error:
        return VerifyResult(error=_cannot_read(path, error))
    except MemoryError:
        return VerifyResult(error=f"{path}: not enough memory to read it")
    return VerifyResult((damage,) if damage else ())


def states(output_dir: str | os.PathLike[str], name: str | None = None) -> dict[Path, int]:
    """The state folders that `guards` finds with their steps, newest first; without a readable guard -1, last."""
    return {path: guard["step"] if guard else -1 for path, guard in guards(output_dir, name).items()}


def guards(output_dir: str | os.PathLike[str], name: str | None = None) -> dict[Path, dict[str, Any] | None]:
    """State folders (of LoRA `name`) with the content of their guard files, newest first; last, None without one.

    The trainer may rename or delete states meanwhile: one that vanishes is left out, one that cannot be read is listed.
    {} where there is no `output_dir`. OSError where it cannot be listed, because then {} would mean "no checkpoint".
    """
    try:
        names = os.listdir(output_dir)
    except FileNotFoundError:
        return {}
    found = list[tuple[int, float, Path, dict[str, Any] | None]]()
    for entry in names:
        if entry.startswith(".") or not re.fullmatch(rf"{_any_or(name)}{_NUMBER}-state", entry):
            continue
        path = Path(output_dir) / entry
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            found.append((-1, 0.0, path, None))
            continue
        if stat.S_ISDIR(status.st_mode):
            guard = guard_of(path)
            if guard or exists(path):
                found.append((guard["step"] if guard else -1, status.st_mtime, path, guard))
    return {path: guard for _, _, path, guard in sorted(found, key=lambda f: f[:2], reverse=True)}


def newest_valid(output_dir: str | os.PathLike[str], name: str | None = None, deep: bool = False) -> Path | None:
    """The newest state that verifies, or None. Raises OSError as `states` does."""
    return next((path for path in states(output_dir, name) if verify(path, deep).usable), None)


def set_aside(path: str | os.PathLike[str], reason: str) -> Path:
    """Rename a bad state or cache file to `….bad` (`….bad-2`, …), its reason beside it; returns the new path.

    OSError where it cannot be renamed (FileNotFoundError: it vanished). The reason is left out where the disk is full.
    """
    path = Path(path)
    number = 1
    while exists(aside := path.with_name(path.name + (".bad" if number == 1 else f".bad-{number}"))):
        number += 1
    rename(path, aside, sync=False)
    with contextlib.suppress(OSError):
        atomic_write(aside.with_name(aside.name + ".reason.txt"), reason + "\n")
    return aside


def retire(folder: str | os.PathLike[str]) -> bool:
    """Delete an old state if another state of the same LoRA verifies; False: none does, so it is kept.

    All states are deleted by this function, whoever decides that one is old. A state without a guard file is deleted at
    once: nobody resumes from it. It is renamed first, so that a kill leaves no half state under its name.

    OSError where a disk does not read or write; the state then keeps its name, or `sweep` removes the rest of it.
    """
    folder = Path(folder)
    match = re.fullmatch(rf"(.+?){_NUMBER}-state", folder.name)
    try:
        guarded = _parse_guard((folder / GUARD).read_bytes()) is not None
    except (FileNotFoundError, NotADirectoryError):
        guarded = False
    if guarded:
        others = [path for path in states(folder.parent, match and match[1]) if path.name != folder.name]
        if not any(verify(path).usable for path in others):
            return False
    gone = folder.with_name(f".{folder.name}.{os.getpid()}.gone")
    try:
        rename(folder, gone, sync=False)
    except FileNotFoundError:
        return True  # another process deleted it
    shutil.rmtree(gone)
    return True


def exists(path: Path) -> bool:
    """Is there anything at `path`? True where that cannot be found out."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _any_or(name: str | None) -> str:
    """The pattern of a LoRA's name, which is not read from a file's: it may end as with an epoch (anna-202411)."""
    return ".+?" if name is None else re.escape(name)


def sweep(output_dir: str | os.PathLike[str], name: str | None = None) -> list[Path]:
    """Remove what killed writers of states, LoRAs and samples (of LoRA `name`) left. Returns what was removed.

    For the one trainer of a run. A complete state that lost its name (the kill came between the two renames that
    replace a state) gets it back. Other files are left alone, because other processes write into the same folder. So is
    what cannot be removed or judged (a disk that went read-only): it is not in the result, and the next sweep tries
    again. Never raises OSError.
    """
    try:
        names = os.listdir(output_dir)
    except OSError:
        return []
    pattern = re.compile(rf"\.{_any_or(name)}{_NUMBER}{_LEFT}")
    left = [(Path(output_dir) / entry, match) for entry in names if (match := pattern.fullmatch(entry))]
    # Where both the old and the new state are complete, the new one counts.
    for path, match in sorted(left, key=lambda entry: entry[1]["state"] == "old"):
        final = path.with_name(path.name[1:].rsplit(".", 2)[0])
        with contextlib.suppress(OSError):
            if match["state"] in ("tmp", "old") and not exists(final):
                result = verify(path)
                if result.usable:
                    rename(path, final, sync=False)
                if not result.problems:
                    continue  # it has its name, or nothing is known about it
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return [path for path, _ in left if not exists(path)]


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: it can be used, 1: it is bad, 3: it cannot be verified. The reasons go to standard error."""
    import argparse  # not in the monitor, which imports this file, too

    parser = argparse.ArgumentParser(prog="python -m guards.checkpoint", description="Verify a state or a LoRA file.")
    parser.add_argument("command", choices=("verify", "verify-lora"), help="a state folder, or a safetensors file")
    parser.add_argument("path", type=Path)
    parser.add_argument("--deep", action="store_true", help="of a state: also finite weights, an optimizer that loads")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(argv)
    is_state = arguments.command == "verify"
    result = verify(arguments.path, arguments.deep) if is_state else verify_lora(arguments.path)
    for line in (*result.problems, result.error):
        if line:
            print(line, file=sys.stderr)
    if arguments.json:
        guard = (guard_of(arguments.path) if is_state else None) or {}
        answer = {"path": str(arguments.path), "step": guard.get("step"), "usable": result.usable, **asdict(result)}
        print(json.dumps(answer))
    return 1 if result.problems else 3 if result.error else 0


if __name__ == "__main__":
    raise SystemExit(main())
