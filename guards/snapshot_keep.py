"""Writes a snapshot in memory to the disk, as a checkpoint: `python -m guards.snapshot_keep RECORD FOLDER`.

The monitor runs this when a run ends, with the interpreter that made the record: the files of a state are torch's, and the
monitor works without torch. The last line of its output is JSON: {"state": the folder that it wrote}.

Exit codes: 0 done; 1 the record cannot be used, or the disk refuses, with the reason on standard error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from guards import checkpoint, snapshot_record


def keep(path: Path, output: Path) -> Path:
    """Write the state of the record `path` into the folder `output`; returns the state's folder.

    Raises:
        snapshot_record.RecordError: the record cannot be used.
        OSError, RuntimeError (torch's): the state cannot be written; nothing of it is left.
    """
    header, files = snapshot_record.files(path)
    state = output / Path(header.name).name
    extra = {"belongs": header.belongs} if header.belongs is not None else {}
    with checkpoint.writing(state, header.step, header.epoch, **extra) as temporary:
        snapshot_record.write_folder(temporary, files)
    return state


def main(argv: list[str]) -> int:
    """The command. Exit codes as the module says."""
    try:
        state = keep(Path(argv[0]), Path(argv[1]))
    except (snapshot_record.RecordError, OSError, RuntimeError) as error:
        print(getattr(error, "strerror", None) or error, file=sys.stderr)
        return 1
    print(json.dumps({"state": str(state)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
