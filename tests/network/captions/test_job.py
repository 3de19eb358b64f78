"""The loop over the images: one that fails stops no other, and a model that hangs ends the job."""

from pathlib import Path

import caption_server
import pytest
from caption_server import run, texts
from draft_helpers import photo
from runs_helpers import python

from captions import job


def test_a_failed_image_stops_no_other_a_busy_server_is_asked_again_and_many_failures_stop(images, server, monkeypatch):
    server.answer = lambda number, question: (503, b"", {}) if number % 3 == 1 else "" if number == 2 else f"a {number}"
    (images / "3.png").write_bytes(b"not an image")
    report = run(server, images)
    assert (report.written, report.failed, report.left, report.reason) == (2, 2, 0, "")
    assert sorted(texts(images)) == ["1", "2"]
    for number in "12":
        (images / f"{number}.txt").unlink()
    photo(images / "3.png", seed=3)
    monkeypatch.setattr(job, "FAILURES_IN_A_ROW", 2)
    first = len(server.questions) + 1
    server.answer = lambda number, question: "fine" if number == first else ""
    report = run(server, images)
    assert (report.written, report.failed, report.left) == (1, 2, 1) and "empty" in report.reason


HANGS = """
import sys, time
from pathlib import Path
from caption_server import Folder
from captions import job
wait = lambda *_: time.sleep(600)
loads = sys.argv[2] == "loads"
job.run(Folder(Path(sys.argv[1])), (lambda: wait) if loads else wait, str, 0.5, 0.5)
"""


@pytest.mark.parametrize(("which", "waited"), [("no", "the model to load"), ("loads", "a caption of 0.png")])
def test_a_model_that_hangs_ends_the_job_with_the_reason(images, which, waited):
    done = python("-c", HANGS, str(images), which, timeout=60, PYTHONPATH=str(Path(caption_server.__file__).parent))
    assert done.returncode == job.EXIT_STUCK
    assert f"waited 0.5 s for {waited}" in done.stderr and "start it again to continue" in done.stderr
