"""Downloads and uploads of kohya's trainers, without a hub: what ends them, which phase they are."""

import argparse
import threading
from types import SimpleNamespace

from guards import deadline, hub as requests
from sd_scripts_patches import hub, session


def test_a_slow_download_continues_while_bytes_arrive(tmp_path, monkeypatch):
    """With a clock that advances one second per call: ten times the limit in all, and a byte arrives at every call."""
    blobs, calls = tmp_path / "models--a--b" / "blobs", []
    blobs.mkdir(parents=True)
    done = threading.Event()

    def seconds():
        calls.append(1)
        with open(blobs / "x.incomplete", "ab") as file:
            file.write(b"x")
        if len(calls) > 30:
            done.set()
        return float(len(calls))

    monkeypatch.setenv("HANGPROOF_HUB_TIMEOUT_S", "3")
    monkeypatch.setattr(deadline, "POLL_S", 0.01)
    monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=seconds))
    assert hub.download(lambda: done.wait(60) and "path", tmp_path, "a file") == "path"


def test_an_upload_during_training_is_phase_save(monkeypatch):
    """In phase "step" the monitor would take it for a hung step."""
    phases, beat = [], session.heartbeat()
    beat.phase("step")
    upload = hub._upload(lambda args, src: phases.append(beat.current_phase))
    for limit in ("5", "0"):
        monkeypatch.setenv("HANGPROOF_UPLOAD_TIMEOUT_S", limit)
        upload(argparse.Namespace(), "x.safetensors")
    assert phases == ["save", "save"] and beat.current_phase == "step"
