"""`python -m ui.new.export_job DRAFT`: writes a draft as a ZIP that trains elsewhere.

It creates the run in a private data folder, with the form's settings, the edited script and the draft's images, packs
it as `launch bundle` does, and removes the rest. The base model need not be here: the other machine fetches it.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import presets
import runs
from launch import bundle
from launch.common import LaunchError
from presets import data_root
from runs.files import RunError, explained
from ui.dataset import draft
from ui.new import export, form, run_starts, settings


def write(draft_id: str) -> Path:
    """Write the ZIP of a draft, completely or not at all, in place of earlier ones; its path.

    Raises:
        RunError: a field is invalid, there are no images, or the disk does not take it.
    """
    spec = run_starts.as_run(draft_id, form.spec_of(settings.current(draft_id)))
    sources = draft.sources(draft_id)
    if not sources:
        raise RunError("Add at least one image in step 2; the ZIP holds the data set")
    folder = export.folder_of(draft_id)
    path = folder / f"{spec.slug}.zip"
    own_models = data_root() / "models.toml"
    with explained("write the ZIP"), tempfile.TemporaryDirectory(dir=folder, prefix=".work-") as work:
        if own_models.is_file():
            shutil.copyfile(own_models, Path(work) / own_models.name)
        os.environ["HANGPROOF_DATA"] = work  # of this process, which ends with it
        try:
            runs.create(spec, sources)
            bundle.write(path, spec.slug, list(bundle.entries(spec, None, False)))
        except LaunchError as error:
            raise RunError(str(error)) from error
    for old in folder.glob("*.zip"):
        if old != path:
            old.unlink(missing_ok=True)
    return path


def main(argv: list[str]) -> int:
    """Exit code 0: the last line of the output is {"file"}. 1: the reason is on standard error."""
    try:
        if len(argv) != 1 or not draft.is_id(argv[0]):
            raise RunError("usage: python -m ui.new.export_job DRAFT")
        path = write(argv[0])
    except (RunError, presets.PresetError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"file": str(path), "bytes": path.stat().st_size}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
