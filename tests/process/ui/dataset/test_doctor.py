"""The check of a draft's images as a process: cancelled, killed, gone on with; and the conversion of all images of a kind."""

import json
import os
import signal
import sys

import psutil
import pytest
from draft_helpers import drop, item_of, photo
from PIL import Image
from ui_page import until

import runs
from ui import jobs
from ui.dataset import doctor, draft, draft_store, measure

pytestmark = pytest.mark.slow


def wait(draft_id: str) -> dict:
    until(lambda: (doctor.progress(draft_id) or {"state": "running"})["state"] != "running", "the end of the check")
    return doctor.progress(draft_id)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
def test_a_check_that_is_cancelled_or_killed_goes_on_and_the_second_one_measures_nothing(data, tmp_path):
    folder = tmp_path / "in"
    for number in range(6):
        photo(folder / f"{number}.jpg", seed=number, size=(300, 200))
    draft_id = draft.new_id()
    drop(draft_id, *sorted(folder.iterdir()))
    # A pipe in place of one image holds the check up, as a disk that does not answer.
    held = draft.original(draft_id, item_of(draft_id, "3.jpg").id)
    held.rename(tmp_path / "kept.jpg")
    os.mkfifo(held)
    path = draft.folder(draft_id) / measure.NAME

    def begun() -> int:
        """Start a check, wait until the other images are measured; its process."""
        doctor.start(draft_id)
        until(lambda: doctor.progress(draft_id)["total"] > 0, "it begins")
        until(lambda: len(measure.stored(draft.folder(draft_id))) >= 4, "the others are measured")
        assert doctor.progress(draft_id)["state"] == "running"
        return json.loads((draft.folder(draft_id) / jobs.FOLDER / f"{doctor.JOB}.json").read_text())["pid"]

    begun()
    with pytest.raises(runs.RunError, match="running already"):
        doctor.start(draft_id)
    doctor.cancel(draft_id)
    assert wait(draft_id)["state"] == "cancelled"
    keeper = psutil.Process(begun())
    for process in [*keeper.children(recursive=True), keeper]:
        process.send_signal(signal.SIGKILL)
    assert wait(draft_id)["state"] == "lost"
    with path.open("ab") as file:
        file.write(b'{"version": 1, "sha256": "cut off')
    held.unlink()
    (tmp_path / "kept.jpg").rename(held)
    before = len(measure.stored(draft.folder(draft_id)))
    doctor.start(draft_id)
    first = wait(draft_id)
    assert first["state"] == "done" and first["total"] == 6 - before < 3
    assert len(measure.stored(draft.folder(draft_id))) == 6 and doctor.examine(draft_id).unmeasured == 0
    doctor.start(draft_id)
    again = wait(draft_id)
    assert (again["state"], again["total"]) == ("done", 0)


def test_all_of_a_kind_are_converted_in_the_background(data, tmp_path):
    folder = tmp_path / "in"
    for number in range(3):
        photo(folder / f"{number}.png", seed=number, size=(600, 500))
        Image.open(folder / f"{number}.png").convert("CMYK").save(folder / f"{number}.jpg")
        (folder / f"{number}.png").unlink()
    draft_id = draft.new_id()
    drop(draft_id, *sorted(folder.iterdir()))
    measure.run(draft.folder(draft_id), draft_store.read(draft_id)["images"], lambda line: None)
    assert len(doctor.examine(draft_id).findings["changed"]) == 3
    assert doctor.fix(draft_id, "changed") == ""
    assert wait(draft_id)["state"] == "done"
    assert "changed" not in doctor.examine(draft_id).findings
    assert draft.undo(draft_id) and len(doctor.examine(draft_id).findings["changed"]) == 3
