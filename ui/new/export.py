"""Export of a draft as a ZIP that trains elsewhere, before there is a run.

A process of its own makes it (ui/new/export_job.py, started by ui/jobs.py), so it outlives the page's server; any page
reads here what it does and where its file is.
"""

from pathlib import Path
from typing import Any

from runs.files import RunError
from ui import jobs
from ui.dataset import draft

JOB, FOLDER = "export", "export"
LIMIT_S = 3600.0


def start(draft_id: str) -> None:
    """Start to write the ZIP in the background. RunError: one is being written already."""
    jobs.start(folder_of(draft_id), JOB, ["ui.new.export_job", draft_id], LIMIT_S)


def cancel(draft_id: str) -> None:
    """End the export, if one is being written."""
    jobs.cancel(draft.folder(draft_id) / FOLDER, JOB)


def folder_of(draft_id: str) -> Path:
    """The folder of a draft's ZIP. RunError: it cannot be made."""
    folder = draft.folder(draft_id) / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror}; check the disk") from error
    return folder


def status(draft_id: str) -> dict[str, Any]:
    """The last export: {state: none, running, done, failed, cancelled or lost; seconds, file, bytes, error}."""
    folder = draft.folder(draft_id) / FOLDER
    job = jobs.read(folder, JOB)
    if job is None:
        return {"state": "none"}
    answer: dict[str, Any] = {"state": job.state, "seconds": round(job.seconds)}
    if job.state == "done":
        _, found, _ = jobs.output(folder, JOB)
        path = Path(str(found["file"])) if isinstance(found, dict) and "file" in found else None
        if path is None or path.parent != folder or not path.is_file():
            return {"state": "none"}
        return {**answer, "file": str(path), "bytes": path.stat().st_size}
    if job.state == "failed":
        lines = jobs.output(folder, JOB)[2].strip().splitlines()
        answer["error"] = "\n".join(line.removeprefix("export: ") for line in lines[-6:]) or "The export failed"
    return answer
