"""Export of a draft as a ZIP that trains elsewhere, before there is a run: a button beside the script.

`python -m ui.new.export DRAFT` writes it, in the background (ui/jobs.py). It creates the run in a private data folder,
with the form's settings, the edited script and the draft's images, packs it as `launch bundle` does, and removes the
rest. The base model need not be here: the other machine fetches it.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import presets
import runs
from presets import data_root
from runs.files import RunError, explained
from runs.manage import size_text
from ui import jobs
from ui.dataset import draft
from ui.html import esc
from ui.new import form, run_starts
from ui.served import file_url

JOB = "export"
LIMIT_S = 3600.0


def folder_of(draft_id: str) -> Path:
    """The folder of a draft's ZIP."""
    return draft.folder(draft_id) / "export"


def start(draft_id: str) -> None:
    """Start to write the ZIP in the background. RunError: one is being written, or images are being imported."""
    run_starts.no_import(draft_id)
    jobs.start(folder_of(draft_id), JOB, ["ui.new.export", draft_id], LIMIT_S)


def look(draft_id: str) -> tuple[bool, str]:
    """(whether the ZIP is being packed, the last export as markup)."""
    from ui.run import fold

    return fold.outcome(folder_of(draft_id), JOB, "Packing the ZIP", "Not exported", _download)


def _download(found: dict[str, Any]) -> str:
    path = Path(found["file"])
    if not path.is_file():
        return ""
    link = f'<a class="hp-link" data-testid="export-link" href="{esc(file_url(path))}" download="{esc(path.name)}">Download {esc(path.name)}</a>'
    text = f"{link} ({size_text(found['bytes'])}). Unpack it and run train.sh or train.bat."
    return f'<p class="hp-hint" role="status">{text}</p>'


def draw(draft_id: str) -> None:
    """The button, and what it does."""
    import gradio as gr

    from ui.run import fold

    go = gr.Button("Export (ZIP)", size="sm", scale=0, min_width=150, elem_id="export-zip")
    begin, cancel = lambda: start(draft_id), lambda: jobs.cancel(folder_of(draft_id), JOB)
    fold.job(go, begin, lambda: look(draft_id), cancel, JOB, js=form.FLUSH)


def write(draft_id: str) -> Path:
    """Write the ZIP of a draft, completely or not at all, in place of earlier ones; its path.

    Raises:
        RunError: a field is invalid, there are no images, or the disk does not take it.
    """
    from launch import bundle

    spec = run_starts.for_run(draft_id, form.spec_of(form.current(draft_id)))
    sources = draft.sources(draft_id)
    if not sources:
        raise RunError("Add at least one image in step 1; the ZIP holds the data set")
    folder = folder_of(draft_id)
    path = folder / f"{spec.slug}.zip"
    own_models = data_root() / "models.toml"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".work-*"):  # of an export that was killed
        shutil.rmtree(left, ignore_errors=True)
    with explained("write the ZIP"), tempfile.TemporaryDirectory(dir=folder, prefix=".work-") as work:
        if own_models.is_file():
            shutil.copyfile(own_models, Path(work) / own_models.name)
        os.environ["HANGPROOF_DATA"] = work  # of this process, which ends with it
        runs.create(spec, sources)
        bundle.write(path, spec.slug, list(bundle.entries(spec, None, False)))
    for old in folder.glob("*.zip"):
        if old != path:
            old.unlink(missing_ok=True)
    return path


def main(argv: list[str]) -> int:
    """Exit code 0: the last line of the output is {"file", "bytes"}. 1: the reason is on standard error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # "Cancel": nothing of it is left
    try:
        (draft_id,) = argv
        path = write(draft_id)
    except (RunError, presets.PresetError) as error:
        print("; ".join(str(error).splitlines()), file=sys.stderr)
        return 1
    print(json.dumps({"file": str(path), "bytes": path.stat().st_size}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
