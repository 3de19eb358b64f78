"""Lines on a full disk: a metric or an event that cannot be written costs that line, never a step or a later line."""

import json
import math
import os
import sys
import time

from guards.checkpoint import append_line
from guards.metrics import Metrics


def test_a_line_that_a_kill_cut_off_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "a"}\n{"kind": "b", "mess')
    append_line(path, {"kind": "c"})
    append_line(path, {"kind": "d"})
    assert path.read_bytes().splitlines()[-2:] == [b'{"kind": "c"}', b'{"kind": "d"}']
    assert os.stat(path).st_mode & 0o600 == 0o600


def test_each_line_says_which_attempt_step_and_epoch_it_is_of(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_RUN", str(tmp_path))
    monkeypatch.setenv("HANGPROOF_ATTEMPT", "3")
    open_before = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    Metrics.from_env().step(7, 2, math.nan, 1e-4, 0.1234567)
    Metrics.from_env().validation(8, 2, 0.5, 4)
    assert not open_before or len(os.listdir("/proc/self/fd")) == len(open_before)
    step, validation = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert abs(step.pop("mono_s") - time.monotonic()) < 60 and step.pop("t").endswith("Z") and validation.pop("t")
    about = {"attempt": 3, "epoch": 2}
    assert step == {"kind": "step", "step": 7, "loss": None, "lr": 1e-4, "step_s": 0.123457, **about}
    assert validation == {"kind": "validation", "step": 8, "val_loss": 0.5, "items": 4, **about}


def test_a_full_disk_costs_lines_that_are_counted_each_time_and_the_next_line_is_whole(tmp_path, monkeypatch, capsys):
    folder, real, full = tmp_path / "run", os.write, False
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:20] if full else data))
    metrics = Metrics(folder / "metrics.jsonl", 1)
    for step in range(1, 8):
        full = step == 4  # in the middle of a line
        if step == 3:
            folder.mkdir()
        metrics.step(step, 1, 0.5, 1e-4, 0.1)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines if line.endswith(b"}")] == [3, 5, 6, 7] and len(lines) == 5
    text = capsys.readouterr().err
    assert text.count("goes on") == 2 and "2 lines were lost" in text and "1 lines were lost" in text
    assert text.count("lines were lost") == 2
