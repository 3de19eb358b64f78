"""A draft and a run as a ZIP with script, data set and images."""

import zipfile

import pytest
from configure_helpers import DRAFT, FORM, edit, exported
from draft_helpers import photo
from runs_helpers import sources
from ui_page import until

import runs
from runs.files import RunError
from ui import jobs, served
from ui.dataset import draft
from ui.new import export, script_editor
from ui.run import launch_tab

pytestmark = pytest.mark.slow


def test_a_draft_is_exported_with_its_script_data_set_and_images(filled):
    script_editor.save(DRAFT, edit(script_editor.shown(DRAFT).text))
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
    assert not [one for one in path.parent.glob(".work*")], "no working folder is left"
    assert not (runs.outputs_dir() / "cat").exists()


def test_an_export_that_cannot_be_made_says_why(data):
    draft.save_fields(DRAFT, {**FORM, "rank": 0})
    export.start(DRAFT)
    assert jobs.wait(export.folder_of(DRAFT), export.JOB, 60).state == "failed"
    busy, shown = export.look(DRAFT)
    assert not busy and "Not exported: rank: " in shown
    draft.save_fields(DRAFT, {"rank": 4})
    with pytest.raises(RunError, match="at least one image"):
        export.write(DRAFT)


def test_a_run_is_exported_as_a_zip_that_the_page_sends(data, tmp_path):
    folder = runs.create(runs.make(FORM), sources([photo(tmp_path / "a.png", 1)]))
    launch_tab.write_files(folder, "bundle", [False])
    until(lambda: jobs.read(folder, "launch-bundle").state == "done", "the ZIP")
    shown = launch_tab.written(folder, jobs.output(folder, "launch-bundle")[1])
    assert 'download="cat.zip"' in shown and served.find(str(folder / "cat.zip"))[1] == "application/zip"
    with zipfile.ZipFile(folder / "cat.zip") as archive:
        assert archive.testzip() is None and {"cat/train.sh", "cat/train.bat"} <= set(archive.namelist())
