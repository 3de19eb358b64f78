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
def test_a_check_that_is_cancelled_or_killed_goes_on_and_the_second_one_measures_nothing(mine, tmp_path):
    drop(mine, *(photo(tmp_path / f"{number}.jpg", number, size=(300, 200)) for number in range(6)))
    # A pipe in place of one image holds the check up, as a disk that does not answer.
    held = draft.original(mine, item_of(mine, "3.jpg").id)
    held.rename(tmp_path / "kept.jpg")
    os.mkfifo(held)
    path = draft.folder(mine) / measure.NAME

    def begun() -> int:
        """Start a check, wait until the other images are measured; its process."""
        doctor.start(mine)
        until(lambda: doctor.progress(mine)["total"] > 0, "it begins")
        until(lambda: len(measure.stored(draft.folder(mine))) >= 4, "the others are measured")
        assert doctor.progress(mine)["state"] == "running"
        return json.loads((draft.folder(mine) / jobs.FOLDER / f"{doctor.JOB}.json").read_text())["pid"]

    begun()
    with pytest.raises(runs.RunError, match="running already"):
        doctor.start(mine)
    doctor.cancel(mine)
    assert wait(mine)["state"] == "cancelled"
    keeper = psutil.Process(begun())
    for process in [*keeper.children(recursive=True), keeper]:
        process.send_signal(signal.SIGKILL)
    assert wait(mine)["state"] == "lost"
    with path.open("ab") as file:
        file.write(b'{"version": 1, "sha256": "cut off')
    held.unlink()
    (tmp_path / "kept.jpg").rename(held)
    before = len(measure.stored(draft.folder(mine)))
    doctor.start(mine)
    first = wait(mine)
    assert first["state"] == "done" and first["total"] == 6 - before < 3
    assert len(measure.stored(draft.folder(mine))) == 6 and doctor.examine(mine).unmeasured == 0
    doctor.start(mine)
    again = wait(mine)
    assert (again["state"], again["total"]) == ("done", 0)


def test_all_of_a_kind_are_converted_in_the_background(mine, tmp_path):
    for number in range(3):
        path = photo(tmp_path / f"{number}.jpg", number, size=(600, 500))
        Image.open(path).convert("CMYK").save(path)
        drop(mine, path)
    measure.run(draft.folder(mine), draft_store.read(mine)["images"], lambda line: None)
    assert len(doctor.examine(mine).findings["changed"]) == 3
    assert doctor.fix(mine, "changed") == ""
    assert wait(mine)["state"] == "done"
    assert "changed" not in doctor.examine(mine).findings
    assert draft.undo(mine) and len(doctor.examine(mine).findings["changed"]) == 3
