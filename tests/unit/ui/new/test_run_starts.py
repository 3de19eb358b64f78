"""Start checks everything before a run is created, and asks once about what a person may have overlooked."""

import json
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from configure_helpers import values
from draft_helpers import add_photos, create_run, drop, photo, photo_folder

import runs
from launch import rehearse
from ui.dataset import captioning, draft, draft_store, imports
from ui.new import export, form, new_lora, run_starts, summary, sweep

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_start_asks_once_about_images_that_nothing_describes_and_about_a_failed_rehearsal(mine, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr("ui.run.actions.start", begun.append)

    def start() -> tuple[str, str]:
        *_, (problem, name, _) = new_lora.start(mine, {})
        return problem, name

    add_photos(mine, tmp_path, 2)
    form.save(mine, {"name": "bare", "model": "tiny-flux"}, typed=True)
    assert "2 of 2 images have no caption" in summary.save_settings(mine, {})["said"][0], "the plan says so before"
    problem, _ = start()
    assert "2 of 2 images have no caption" in problem and "again to start anyway" in problem

    spec = run_starts.for_run(mine, run_starts.checked(mine)[0])
    stages = [{"key": "load", "title": "Load", "state": rehearse.FAILED}]
    failed = {"state": rehearse.FAILED, "digest": rehearse.digest(spec), "stages": stages}
    failed |= {"problem": {"stage": "Load", "title": "No memory."}, "asked": True}  # asked: of old versions
    rehearsed = run_starts.rehearsal_folder(mine)
    rehearsed.mkdir()
    (rehearsed / rehearse.FILE).write_text(json.dumps(failed))
    problem, _ = start()
    assert "have no caption" in problem and "failed at “Load”: No memory. Press" in problem
    assert start() == ("", "bare") and [one.name for one in begun] == ["bare"]

    form.save(mine, {"name": "described", "trigger": "tok"}, typed=True)
    (rehearsed / rehearse.FILE).unlink()
    assert start() == ("", "described")

    form.save(mine, {"name": "captioned", "trigger": ""}, typed=True)
    monkeypatch.setattr("ui.dataset.captioning.running", lambda _: True)
    captioning.begin(mine, {})
    assert "Captions are still being written" in start()[0]
    draft.set_caption(mine, draft.items(mine)[0].id, "written meanwhile")
    assert start() == ("", "captioned"), "one more has a caption, and nothing new is asked"
    with monkeypatch.context() as patch, pytest.raises(runs.RunError, match="A run named 'captioned' already exists"):
        patch.setattr("ui.dataset.draft.sources", lambda _: pytest.fail("before an image is copied"))
        run_starts.start(mine)
    tried = ThreadPoolExecutor(2).map(lambda _: run_starts.start_example()[0].name, range(2))  # at the same moment
    assert {*tried} == {"first-try", "first-try-2"}
    monkeypatch.setattr("ui.run.actions.start", Mock(side_effect=runs.RunError("there is no monitor")))
    form.save(mine, {"name": "refused"}, typed=True)
    with pytest.raises(runs.RunError, match="The run refused was created but did not start: there is no monitor"):
        run_starts.start(mine)  # as the API does


def test_no_run_begins_with_a_part_of_the_images_that_are_imported(mine, tmp_path, monkeypatch):
    monkeypatch.setattr("ui.jobs.start", lambda *_: None)  # the import is as slow as can be
    add_photos(mine, tmp_path / "first", 1)
    form.save(mine, values(model="tiny-flux"))
    imports.start_folder(mine, str(photo_folder(tmp_path / "more", 2)))
    for start in (run_starts.start, lambda _: sweep.start(mine, {"rank": "4, 8"}), export.start):
        with pytest.raises(runs.RunError, match="still being imported in step 1; wait, or cancel"):
            start(mine)
    assert runs.list_runs() == []
    imports.cancel(mine)
    assert run_starts.checked(mine)


def test_a_run_that_took_the_last_space_of_the_disk_is_made_all_the_same(mine, tmp_path, monkeypatch):
    add_photos(mine, tmp_path, 1)
    monkeypatch.setattr(draft_store.DraftFile, "store", Mock(side_effect=runs.RunError("the disk is full")))
    folder, _ = run_starts.create(mine, runs.make({"name": "made", "model": "tiny-flux"}))
    assert runs.list_runs() == [folder] and draft.images_not_in_a_run(mine) == 1, "the page asks before it replaces it"


def test_what_cannot_start_is_reported_before_anything_is_created_and_a_warning_starts(mine, tmp_path, monkeypatch):
    with pytest.raises(runs.RunError) as caught:
        create_run(mine, values(name="", epochs=None))
    assert {fault.field for fault in caught.value.faults} == {"name", "epochs", "images"}
    add_photos(mine, tmp_path, 2)
    for given, message in (
        ({"model": "flux-dev", "backend": "sd-scripts"}, r"model: .*flux1-dev\.safetensors"),
        ({"rank": 1_000_000_000}, "rank: Must be 16384 or less"),
        ({"store": "gopher://x/y"}, "store: "),
    ):
        with pytest.raises(runs.RunError, match=message):
            create_run(mine, values(**{"rank": 4, "store": "", **given}))
    assert runs.list_runs() == [] and len(draft.items(mine)) == 2
    folder, messages = create_run(mine, values(learning_rate="5"))
    assert runs.load(folder).learning_rate == 5
    warning = "Warning: Learning rate: Learning rate 5 is 25,000 times the usual"
    assert any(line.startswith(warning) for line in messages)


def test_the_control_images_of_a_folder_have_its_name_in_the_run(data, mine, tmp_path, monkeypatch):
    monkeypatch.setattr("ui.new.form.problems", lambda *_, **__: [])  # neither the model nor its trainer is here
    drop(mine, (photo(tmp_path / "0.png"), "My photos/0.png"))
    form.save(mine, {"name": "pairs", "trigger": "x", "model": "flux-kontext", "control_dir": str(tmp_path / "of")})
    photo(tmp_path / "of" / "My photos" / "0.png")
    with pytest.raises(runs.RunError, match=r"No control image My-photos/0\.\* in"):
        run_starts.checked(mine)
    (tmp_path / "of" / "My photos").rename(tmp_path / "of" / "My-photos")
    folder, _ = run_starts.create(mine, run_starts.checked(mine)[0])
    assert "control_dir" not in {fault.field for fault in runs.problems(runs.load(folder))}
