"""A draft and a run as a ZIP with script, data set and images."""

import zipfile

import pytest
from configure_helpers import DRAFT, FORM, edit, exported
from ui_page import until

import runs
from runs.files import RunError
from ui import jobs, served
from ui.dataset import draft
from ui.new import export, script_editor

pytestmark = pytest.mark.slow


def test_a_draft_is_exported_with_its_script_data_set_and_images(filled):
    script_editor.save(DRAFT, edit(script_editor.shown(DRAFT).text))
    (export.folder_of(DRAFT) / ".work-killed").mkdir(parents=True)
    path = exported()
    with zipfile.ZipFile(path) as archive:
        names = {name.removeprefix("cat/") for name in archive.namelist()}
        assert {"train.sh", "train.bat", "README.txt", "outputs/cat/run.toml"} <= names
        assert {"datasets/cat/a.png", "datasets/cat/b.png", "datasets/cat/a.txt"} <= names
        assert len(archive.read("cat/README.txt").decode().strip().splitlines()) == 4
        assert '"image_dir": "./datasets/cat"' in archive.read("cat/outputs/cat/job.json").decode()
        assert "# mine" in archive.read("cat/outputs/cat/run.toml").decode()
        assert archive.read("cat/train.bat").count(b"\r\n") > 10
        assert archive.getinfo("cat/train.sh").external_attr >> 16 & 0o111
    assert served.find(str(path))[1] == "application/zip"
    assert served.find(str(path.parent / ".jobs" / "export.json")) is None
    assert 'download="cat.zip"' in export.look(DRAFT)[1]
    assert not [one for one in path.parent.glob(".work*")], "no working folder is left, not even an older one"
    assert not (runs.outputs_dir() / "cat").exists()


def test_a_cancelled_export_leaves_no_copy_of_the_images_and_keys(filled):
    export.start(DRAFT)
    folder = export.folder_of(DRAFT)
    until(lambda: list(folder.glob(".work-*")), "it has begun")
    jobs.cancel(folder, export.JOB)
    assert jobs.wait(folder, export.JOB, 60).state == "cancelled"
    left = {path.name for path in folder.iterdir()}
    assert left <= {".jobs", "cat.zip"}, "the ZIP itself can have been complete when the export was cancelled"


def test_an_export_that_cannot_be_made_says_why(data):
    draft.save_fields(DRAFT, {**FORM, "rank": 0})
    export.start(DRAFT)
    assert jobs.wait(export.folder_of(DRAFT), export.JOB, 60).state == "failed"
    busy, shown = export.look(DRAFT)
    assert not busy and "Not exported: rank: " in shown
    draft.save_fields(DRAFT, {"rank": 4})
    with pytest.raises(RunError, match="at least one image"):
        export.write(DRAFT)
