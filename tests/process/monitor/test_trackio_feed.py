"""The process beside a run that logs it to trackio."""

from monitor_helpers import wait_for

from monitor import start
from monitor.run_folder import RunFolder


def test_without_trackio_an_event_says_how_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text("raise ImportError('No module named trackio')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start.start_tracker(RunFolder(tmp_path))
    wait_for(lambda: "pip install trackio" in (tmp_path / "events.jsonl").read_text(), what="the event")
