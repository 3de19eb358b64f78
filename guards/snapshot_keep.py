"""Makes the state of a snapshot in memory: beside it when a training resumes from it, on the disk when a run ends.

The monitor runs `python -m guards.snapshot_keep RECORD FOLDER` when a run ends, with the interpreter that made the
record: the files of a state are torch's, and the monitor works without torch. The last line of its output is JSON:
{"state": the folder that it wrote}.

Exit codes: 0 done; 1 the record cannot be used, or the disk refuses, with the reason on standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from guards import checkpoint, snapshot_record
from guards.snapshot_record import Header, RecordError
from guards.snapshots import RECORD


def keep(path: Path, output: Path) -> Path:
    """Write the state of the record `path` into the folder `output`; returns the state's folder.

    Raises:
        RecordError: the record cannot be used.
        OSError, RuntimeError (torch's): the state cannot be written; nothing of it is left.
    """
    header, files = snapshot_record.files(path)
    state = output / Path(header.name).name
    write(state, header, files)
    return state


def write(state: Path, header: Header, files: list[snapshot_record.File]) -> None:
    """Write a state as the trainer's own save would. Raises OSError; RuntimeError (torch's) where the disk is full."""
    extra = {"belongs": header.belongs} if header.belongs is not None else {}
    with checkpoint.writing(state, header.step, header.epoch, **extra) as temporary:
        snapshot_record.write_folder(temporary, files)


def restore(folder: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> None:
    """Make the state `folder`, which `--resume` names, from the record that the monitor has chosen; nothing for another state.

    Raises:
        RecordError: the record cannot be used, or its state has no room. It is removed, so the next attempt resumes
            from another one or from the disk.
    """
    if not is_restored(folder, environ):
        return
    folder, chosen = Path(folder), environ[RECORD]
    try:
        header, files = snapshot_record.files(chosen)
        if header.name != folder.name:
            raise RecordError(f"{chosen}: it holds {header.name}, not {folder.name}")
        try:
            write(folder, header, files)
        except (OSError, RuntimeError):  # RuntimeError: torch's. Without its words, which say that a disk is full
            raise RecordError(f"{folder} cannot be written") from None
    except RecordError as error:
        Path(chosen).unlink(missing_ok=True)
        raise RecordError(
            f"the snapshot in memory cannot be used, so the next attempt resumes elsewhere: {error}"
        ) from error
    os.utime(folder / checkpoint.GUARD, (header.wall_s, header.wall_s))


def is_restored(folder: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a state comes from a record: all that belongs to its step was done, and it is gone when the run ends."""
    chosen = environ.get(RECORD, "")
    return bool(chosen) and Path(folder).parent == Path(chosen).parent


def main(argv: list[str]) -> int:
    """The command. Exit codes as the module says."""
    try:
        state = keep(Path(argv[0]), Path(argv[1]))
    except (RecordError, OSError, RuntimeError) as error:
        print(getattr(error, "strerror", None) or error, file=sys.stderr)
        return 1
    print(json.dumps({"state": str(state)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
