"""Unpacks the images and captions of a ZIP file that nobody vouches for.

No name in the ZIP becomes a path: each entry is written to a numbered file, and its name is data for the caller. Sizes
are counted while an entry is read, because a header can lie. A bad entry costs only itself.
"""

import errno
import io
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import presets
from runs.dataset import CAPTION_SUFFIXES
from runs.files import RunError
from runs.pictures import IMAGE_SUFFIXES

ARCHIVE_SUFFIXES = (".zip", ".7z", ".rar", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".cbz", ".cbr")
IGNORED = ("thumbs.db", "desktop.ini", "__macosx")  # files of Windows and macOS; hidden files are ignored as well
FREE_BYTES = 1_000_000  # below this an entry may be packed at any ratio
BLOCK = 1 << 18
DIRECTORY_BYTES_PER_ENTRY = 400  # of the ZIP's directory: 46 and the name, some more for extra fields
MAX_MESSAGES = 20
TOLD = 200  # characters of an error: zipfile's text can repeat a name of 65,535
# zipfile and zlib raise these on damaged data; they have no common class.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, struct.error)
# zipfile unpacks all that follows in one piece where it is bzip2 or LZMA: 4 kB can take 4 GB of memory.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True)
class Entry:
    """An unpacked file: where it is, and its relative path in the ZIP, with `/` and without `..`."""

    path: Path
    name: str


class _Limited(io.BufferedReader):
    """A ZIP as zipfile gets it: that reads the directory as a whole into memory, as large as a header says it is."""

    def __init__(self, path: Path, limit: int, error: RunError):
        super().__init__(io.FileIO(path))
        self.limit, self.error = limit, error

    def read(self, size: int | None = -1) -> bytes:
        if (size or 0) > self.limit:
            self.close()
            raise self.error
        return super().read(size)


def is_zip(name: str) -> bool:
    """Whether a file name is that of a ZIP."""
    return name.lower().endswith(".zip")


def ignored(name: str) -> bool:
    """Whether a relative path is that of a hidden file or of one that a system puts into folders."""
    return any(part.strip(".") and (part[0] == "." or part.lower() in IGNORED) for part in name.split("/"))


def relative_name(name: str) -> str:
    """A relative path with `/`, without empty parts and `.`.

    Raises:
        RunError: it is absolute, has a drive letter, `..` or NUL, or it is empty.
    """
    unified = name.replace("\\", "/")
    parts = [part for part in unified.split("/") if part not in ("", ".")]
    outside = unified.startswith("/") or ".." in parts or "\0" in name or (parts and parts[0][1:2] == ":")
    if outside or not parts:
        raise RunError(f"{name[:200]!r}: the path leads outside the folder; it was not added")
    return "/".join(parts)


def unpack(path: Path, into: Path, name: str = "") -> tuple[list[Entry], list[str]]:
    """Unpack the images and captions of a ZIP into the empty folder `into`.

    Args:
        name: the name of the ZIP in messages; by default that of the file.

    Returns:
        The unpacked files, and one message for each entry that was not unpacked.

    Raises:
        RunError: it is not a ZIP, or it has too many entries. OSError: a file cannot be written.
    """
    name, limits = name or path.name, presets.defaults()["images"]
    many = RunError(f"{name}: the ZIP has more than {limits['max_zip_entries']} entries; split it")
    file = _Limited(path, limits["max_zip_entries"] * DIRECTORY_BYTES_PER_ENTRY, many)
    try:
        archive = zipfile.ZipFile(file)
    except DAMAGE as error:
        file.close()
        why = f"({str(error)[:TOLD]}). Pack it again, or drop the folder."
        raise RunError(f"{name}: Not a readable ZIP file {why}") from error
    found: list[Entry] = []
    messages: list[str] = []
    with file, archive:
        every = archive.infolist()
        # A ZIP of macOS has a hidden file beside each file.
        infos = [one for one in every if not (one.is_dir() or ignored(one.orig_filename.replace("\\", "/")))]
        if len(infos) > limits["max_zip_entries"]:
            raise many
        last = {info.orig_filename: info for info in infos}
        left = limits["max_zip_mb"] * 1_000_000
        for number, info in enumerate(infos):
            shown = name
            try:
                inside = relative_name(info.orig_filename)
                shown = f"{name}: {inside[-200:]}"
                if last[info.orig_filename] is not info:
                    raise RunError("the ZIP has this file twice; the last one is used")
                _check(info, inside)
                target = into / f"{number}{Path(inside).suffix.lower()}"
                left -= _copy(archive, info, target, left)
                if left >= 0:
                    found.append(Entry(target, inside))
            except RunError as error:
                messages.append(f"{shown}: {error}")
            if left < 0:
                messages.append(f"{name}: the files are larger than {limits['max_zip_mb']} MB together; split the ZIP")
                break
    if not found and not messages:
        messages.append(f"{name}: the ZIP has no images and no captions")
    if len(messages) > MAX_MESSAGES:
        more = len(messages) - MAX_MESSAGES
        messages = [*messages[:MAX_MESSAGES], f"{name}: {more} more files were not added"]
    return found, messages


def _check(info: zipfile.ZipInfo, inside: str) -> None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    suffix = Path(inside).suffix.lower()
    if kind not in (0, stat.S_IFREG):
        raise RunError("a link or a special file; replace it by the file itself")
    if suffix in ARCHIVE_SUFFIXES:
        raise RunError("an archive inside the ZIP; unpack it first")
    if suffix not in (*IMAGE_SUFFIXES, *CAPTION_SUFFIXES):
        raise RunError("neither an image nor a caption")
    if info.flag_bits & 1:
        raise RunError("encrypted with a password; unpack the ZIP, then drop its folder")
    if info.compress_type not in METHODS:
        raise RunError("not packed with Deflate; unpack the ZIP, then drop its folder")


def _copy(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, left: int) -> int:
    """Write one entry; returns its size in bytes, at most `left` and some more."""
    limits = presets.defaults()["images"]
    most = limits["max_file_mb"] * 1_000_000
    dense = max(FREE_BYTES, info.compress_size * limits["max_zip_ratio"])
    size, refused = 0, ""
    try:
        with target.open("wb") as out, archive.open(info) as source:
            while size <= min(most, dense, left) and (block := source.read(BLOCK)):
                out.write(block)
                size += len(block)
    except (*DAMAGE, RuntimeError, OSError) as error:
        # An OSError of this disk is not the file's fault; that of a place before its start is EINVAL.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            target.unlink(missing_ok=True)
            raise
        refused = f"the file is damaged ({str(error)[:TOLD]}); pack the ZIP again"
    if size > most:
        refused = f"the file is larger than {limits['max_file_mb']} MB"
    elif size > dense:
        refused = f"the file unpacks to more than {limits['max_zip_ratio']} times its size; it is no image"
    if refused or size > left:
        target.unlink(missing_ok=True)
    if refused:
        raise RunError(refused)
    return size
