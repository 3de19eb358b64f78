"""How a run ends: its outcome, and uploads that are still in progress."""

from patches_helpers import launch, write

from guards import heartbeat

UPLOAD = """
import os, sys, time
from guards import heartbeat
from sd_scripts_patches import hub
def upload():
    time.sleep(float(sys.argv[1]))
    (beat,) = heartbeat.read_all(os.environ["HANGPROOF_HEARTBEAT"])
    print("in the upload:", beat.phase, beat.outcome, beat.note, flush=True)
hub.fire_in_daemon(upload)
"""


def test_a_run_is_done_only_after_its_uploads(tmp_path):
    """From the outcome on, the monitor allows little time: an upload that is still in progress would be killed."""
    script = write(tmp_path, "uploads.py", UPLOAD)
    done = launch(script, "1.5", HANGPROOF_HEARTBEAT=str(tmp_path / "hb"))
    assert done.returncode == 0
    assert "in the upload: end running waiting for 1 uploads to the hub\n" in done.stdout, done.stderr
    (beat,) = heartbeat.read_all(tmp_path / "hb")
    assert (beat.phase, beat.outcome) == ("end", "done")
    settings = {"HANGPROOF_HEARTBEAT": str(tmp_path / "hb"), "HANGPROOF_UPLOAD_EXIT_S": "0.1"}
    unlimited = launch(script, "1.5", "--hangproof_upload_exit_s=0", **settings)
    assert "in the upload: end running" in unlimited.stdout, "a flag wins over the environment"


def test_a_failed_run_reports_its_error_before_it_waits_for_uploads(tmp_path):
    script = write(tmp_path, "uploads.py", UPLOAD + "1 / 0\n")
    done = launch(script, "1.5", HANGPROOF_HEARTBEAT=str(tmp_path / "hb"))
    assert "in the upload: import failed ZeroDivisionError: division by zero\n" in done.stdout, done.stderr
    late = launch(script, "3600", "--hangproof_exit_grace_s=2")
    assert late.returncode == 1
    assert "hangproof: waited 1 s for 1 uploads to the hub; exiting without them" in late.stderr
