"""The local folder that a run writes to first while its own folder is on a disk that stalls (mitigation `save_local`).

It is in the machine's lasting temporary folder, because what is in it must outlive a restart of the machine. There it
is of this user alone, and of one run alone: its name has the random `.run-id` in the run's folder and a checksum of the
run's path, so that a later run of the same name never sees its files. The folder is removed once the run has ended and
every file in it is in the run's folder too; what runs that are gone left behind is removed with it.
"""

import contextlib
import filecmp
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

from guards.checkpoint import files_below, fsync_path
from runs.files import atomic_write, private_folder

ID = ".run-id"  # in the run's folder
OWNER = "run"  # beside the files: the path of the run's folder
FILES = "files"
PARENT = Path(tempfile.gettempdir() if sys.platform == "win32" else "/var/tmp")


def base() -> Path:
    """This user's folder for all runs (may not exist)."""
    user = os.getuid() if sys.platform != "win32" else os.environ.get("USERNAME", "user")
    return PARENT / f"hangproof-{user}"


def identity(run: Path) -> str:
    """The random text that tells this run from every other one; made when missing, "" for a run that is not made yet.

    Raises:
        OSError: it cannot be read or written.
    """
    path = run / ID
    if not run.is_dir():
        return ""
    try:
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        temporary = run / f"{ID}.{os.urandom(4).hex()}"
    try:
        temporary.write_text(os.urandom(16).hex(), encoding="ascii")
        fsync_path(temporary)
        try:
            os.link(temporary, path)
        except OSError:  # another process was first; or a USB stick, which has no hard links
            if not path.exists():
                os.replace(temporary, path)
        return path.read_text(encoding="ascii")
    finally:
        temporary.unlink(missing_ok=True)


def place(run: Path) -> Path:
    """The folder that the run in `run` writes to (may not exist). OSError: the run's own cannot be read or written."""
    run = Path(os.path.realpath(run))  # the path, too: a copy of the folder has the same .run-id
    return base() / f"{run.name[:40]}-{identity(run)[:16]}-{zlib.crc32(os.fsencode(run)):08x}" / FILES


def prepare(run: Path) -> Path:
    """Make the folder, for this user alone; remove what runs that are gone left behind. OSError: says what to do."""
    private_folder(base())
    sweep()
    own = place(run)
    private_folder(own.parent)
    private_folder(own)
    atomic_write(own.parent / OWNER, os.fsencode(run.absolute()))  # an empty one would be that of no run
    return own


def sweep() -> None:
    """Remove the folders of runs that were deleted, renamed or made anew. One whose disk is not there is kept."""
    ours = base().is_dir() and (sys.platform == "win32" or base().lstat().st_uid == os.getuid())
    for folder in base().iterdir() if ours else ():  # another user's may hold a pipe, whose reading never ends
        with contextlib.suppress(OSError):
            run = Path(os.fsdecode((folder / OWNER).read_bytes()))
            known = run.is_absolute() and run.parent.is_dir()  # an empty file, of a full disk, names no run
            if known and (not run.is_dir() or place(run).parent != folder):
                shutil.rmtree(folder)


def drop_copied(run: Path) -> str:
    """Remove the folder of a run that has ended, if the run's folder has all its files; else say where they are.

    Returns:
        "" where nothing is left.
    """
    own = base()
    if not (run / ID).is_file():
        return ""
    try:
        own = place(run)
        filecmp.clear_cache()
        names = [str(path.relative_to(own)) for path in files_below(own)]
        _, other, missing = filecmp.cmpfiles(own, run, names, shallow=False)
        if other or missing:
            return f"{own} is kept, because {run} does not have all of its files, such as {(other + missing)[0]}"
        if own.is_dir():
            shutil.rmtree(own.parent)
    except OSError as error:
        return f"{own} is kept: {error}"
    return ""
