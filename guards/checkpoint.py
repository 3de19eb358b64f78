"""State folders that count only when whole.

Decision: a state is written into a temporary folder beside its place, every file fsynced, a guard file with the size and
SHA-256 of each written last, and the folder renamed into place. `accelerate.save_state` writes in place, so a kill in
mid-save leaves a state that looks whole; here it leaves a temporary folder that nobody resumes from. A truncated
safetensors is refused by its loader, but zeroed data and NaN load silently: hence the hashes, and the deep check.

Names are sd-scripts': `{name}-step00000020-state`, `{name}-000003-state`, `{name}-state`. Standard library only; the deep
check (finite weights, an optimizer that loads) imports torch, and is run as a command where those are not wanted:
`python -m guards.checkpoint verify FOLDER [--deep] [--json]`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

GUARD = "hangproof.json"
VERSION = 1
_STATE = re.compile(r"^(?P<name>.+?)(?:-step(?P<step>\d{8})|-(?P<epoch>\d{6}))?-state$")


class CheckpointError(RuntimeError):
    """A state that cannot be written or used; the message says which, why, and what to do."""


def _fsync_path(path: Path) -> None:
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder; its rename is durable on its own terms
    descriptor = os.open(path, flags if path.is_dir() or os.name != "nt" else os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: str | os.PathLike, data: bytes | str) -> None:
    """Replace `path` by `data` (text as UTF-8): whole and on the disk, or untouched."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync_path(path.parent)


@contextlib.contextmanager
def writing_file(final: str | os.PathLike) -> Iterator[Path]:
    """A temporary path beside `final` for a writer that wants a file name; renamed into place, on the disk, on success."""
    final = Path(final)
    temporary = final.with_name(f".{final.stem}.{os.getpid()}.tmp{final.suffix}")
    try:
        yield temporary
        _fsync_path(temporary)
        os.replace(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync_path(final.parent)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != GUARD)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_guard(folder: str | os.PathLike, step: int, epoch: int, **extra: object) -> None:
    """fsync every file of `folder`, then write its guard file: the mark that the state is whole."""
    folder = Path(folder)
    files = {}
    for path in _files(folder):
        _fsync_path(path)
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    guard = {"version": VERSION, "step": step, "epoch": epoch, **extra, "files": files}
    atomic_write(folder / GUARD, json.dumps(guard, indent=1, ensure_ascii=False))


@contextlib.contextmanager
def writing(final: str | os.PathLike, step: int, epoch: int, **extra: object) -> Iterator[Path]:
    """Write a state: yields an empty temporary folder beside `final`; on success it is guarded and takes that name.

    step, epoch: completed ones, for the guard file, with whatever JSON values `extra` holds. A state already of that
    name is replaced only once the new one is whole. On an error or a kill nothing of that name changes.
    """
    final = Path(final)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        write_guard(temporary, step, epoch, **extra)
        if final.exists():
            old = final.with_name(f".{final.name}.{os.getpid()}.old")
            os.replace(final, old)
            os.replace(temporary, final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _fsync_path(final.parent)


def guard_of(folder: str | os.PathLike) -> dict | None:
    """The guard file's content, or None when there is none or it does not parse."""
    try:
        guard = json.loads((Path(folder) / GUARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    well_formed = (
        isinstance(guard, dict) and isinstance(guard.get("step"), int) and isinstance(guard.get("files"), dict)
    )
    return guard if well_formed else None


def problems(folder: str | os.PathLike, deep: bool = False) -> list[str]:
    """What is wrong with a state; [] when it verifies.

    deep: weights must also be finite and the optimizer's file must load (imports torch where there is one).
    """
    folder = Path(folder)
    if not folder.is_dir():
        return [f"{folder}: is not a folder"]
    guard = guard_of(folder)
    if guard is None:
        return [f"{folder.name}: has no readable guard file ({GUARD}): it was not written to its end"]
    found = []
    for name, expected in guard["files"].items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name}: is missing")
        elif path.stat().st_size != expected["size"]:
            found.append(f"{name}: {path.stat().st_size} bytes where {expected['size']} were written: truncated")
        elif _sha256(path) != expected["sha256"]:
            found.append(f"{name}: its bytes are not those that were written")
    if deep and not found:
        for path in _files(folder):
            found += _deep_problems(path)
    return found


def _deep_problems(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        bad = non_finite(path)
        return [f"{path.name}: {bad} holds NaN or infinity"] if bad else []
    if path.suffix in (".bin", ".pt") and path.name.startswith("optimizer"):
        import pickle

        import torch

        try:
            torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, OSError, EOFError, KeyError, pickle.UnpicklingError) as error:
            return [f"{path.name}: does not load: {str(error).splitlines()[0]}"]
    return []


def non_finite(path: str | os.PathLike) -> str | None:
    """The first tensor of a safetensors file that holds NaN or infinity, or None.

    Format: an 8-byte little-endian header length, a JSON header, the data (github.com/huggingface/safetensors).
    Raises CheckpointError when the file is not that.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise CheckpointError(f"{path}: not a safetensors file, or truncated")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path}: its header does not parse: {error}") from error
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            data = file.read(end - begin)
            if len(data) != end - begin:
                raise CheckpointError(f"{path}: {name} is truncated")
            if entry["dtype"] in _FLOATS and _holds_non_finite(data, *_FLOATS[entry["dtype"]]):
                return name
    return None


# A float is NaN or infinity when all bits of its exponent are set. They stand in its last byte and the upper bits of the one
# before: type -> (its bytes, last bytes that qualify, mask of the byte before). Integers and float8 hold none.
# In plain Python, because a restart waits for this answer, and importing numpy takes longer than looking.
_FLOATS = {
    "F64": (8, b"\x7f\xff", 0xF0),
    "F32": (4, b"\x7f\xff", 0x80),
    "BF16": (2, b"\x7f\xff", 0x80),
    "F16": (2, bytes([*range(0x7C, 0x80), *range(0xFC, 0x100)]), 0x00),
}


def _holds_non_finite(data: bytes, width: int, last: bytes, mask: int) -> bool:
    ends = data[width - 1 :: width]
    if not any(byte in ends for byte in last):  # nearly always: a number of this size is no weight
        return False
    return any(end in last and byte & mask == mask for end, byte in zip(ends, data[width - 2 :: width], strict=True))


def states(output_dir: str | os.PathLike, name: str | None = None) -> list[Path]:
    """State folders of a run (of LoRA `name`), newest first by the guard's step; those without a guard come last."""
    found = []
    for path in Path(output_dir).glob("*-state"):
        match = _STATE.match(path.name)
        if match and path.is_dir() and not path.name.startswith(".") and (name is None or match["name"] == name):
            guard = guard_of(path)
            found.append((guard["step"] if guard else -1, path.stat().st_mtime, path))
    return [path for *_, path in sorted(found, key=lambda f: f[:2], reverse=True)]


def newest_valid(output_dir: str | os.PathLike, name: str | None = None, deep: bool = False) -> Path | None:
    """The newest state that verifies, or None."""
    return next((path for path in states(output_dir, name) if not problems(path, deep)), None)


def set_aside(path: str | os.PathLike, reason: str) -> Path:
    """Rename a bad state or cache file to `….bad` (`….bad-2`, …) with its reason beside it; returns the new path."""
    path = Path(path)
    number = 1
    while (aside := path.with_name(path.name + (".bad" if number == 1 else f".bad-{number}"))).exists():
        number += 1
    os.replace(path, aside)
    atomic_write(aside.with_name(aside.name + ".reason.txt"), reason + "\n")
    return aside


def retire(folder: str | os.PathLike) -> bool:
    """Delete an old state, but only while another one of the same LoRA verifies on the disk; False: none does, so it stays.

    The one way in which states are deleted, whoever decides that one is old. One without a guard file counts for nothing
    and goes. It is renamed first, so that what a kill leaves of it never stands under its own name.
    """
    folder = Path(folder)
    match = _STATE.match(folder.name)
    others = [path for path in states(folder.parent, match and match["name"]) if path.name != folder.name]
    if guard_of(folder) and not any(not problems(path) for path in others):
        return False
    gone = folder.with_name(f".{folder.name}.{os.getpid()}.gone")
    os.replace(folder, gone)
    shutil.rmtree(gone)
    return True


_LEFT = re.compile(
    r"^\.(?P<name>.+?)(-step\d{8}|-\d{6})?"
    r"(-state\.\d+\.(?P<state>tmp|old|gone)|\.safetensors\.\d+\.tmp|(_\d{6}_.+)?\.\d+\.tmp\.\w+)$"
)


def sweep(output_dir: str | os.PathLike, name: str | None = None) -> list[Path]:
    """Remove what killed writers of states, LoRAs and samples (of LoRA `name`) left. For the one trainer of a run.

    A state that is whole and has lost its name (the kill came between the two renames that replace a state) gets it back.
    Only those: others write into the same folder (the monitor its status, the page a picture), and a file taken from under
    a writer's hands is an error there. What another sweep has removed meanwhile is no error here. Returns what was removed.
    """
    found = [(path, _LEFT.match(path.name)) for path in Path(output_dir).glob(".*")]
    left = [(path, match) for path, match in found if match and name in (None, match["name"])]
    for path, match in sorted(
        left, key=lambda entry: entry[1]["state"] == "old"
    ):  # where both are whole the new one counts
        final = path.with_name(path.name[1:].rsplit(".", 2)[0])
        if match["state"] in ("tmp", "old") and not final.exists() and not problems(path):
            os.replace(path, final)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [path for path, _ in left if not path.exists()]


def main(argv: list[str] | None = None) -> int:
    """`verify FOLDER [--deep] [--json]`: exit 0 when the state verifies, 1 with what is wrong on standard error."""
    parser = argparse.ArgumentParser(prog="python -m guards.checkpoint", description="Verify a state folder.")
    parser.add_argument("command", choices=["verify"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--deep", action="store_true", help="finite weights, an optimizer that loads")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        found = problems(arguments.folder, arguments.deep)
    except CheckpointError as error:
        found = [str(error)]
    guard = guard_of(arguments.folder) or {}
    for line in found:
        print(line, file=sys.stderr)
    if arguments.json:
        print(json.dumps({"folder": str(arguments.folder), "step": guard.get("step"), "problems": found}))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
