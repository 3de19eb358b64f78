"""Parts of the patches by themselves: the trackers' outbox, downloads that stand still, sampling's bookkeeping."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sd_scripts_patches import hub, session, timeouts, trackers

ROOT = Path(__file__).resolve().parent.parent


class Tracker:
    """Keeps what it is given; `stuck` makes the next call wait."""

    name = "toy"

    def __init__(self):
        self.rows, self.finished, self.stuck = [], False, threading.Event()
        self.stuck.set()

    def log(self, values, step=None):
        self.stuck.wait(30)
        self.rows.append((step, values))

    def finish(self):
        self.stuck.wait(30)
        self.finished = True


@pytest.fixture
def tracker(monkeypatch):
    monkeypatch.setenv("HANGPROOF_TRACKER_TIMEOUT_S", "0.5")
    made = Tracker()
    trackers.protect(made)
    yield made
    made.stuck.set()


def test_lines_arrive_in_order_and_as_they_were_when_logged(tracker):
    values = {"loss": 0}
    for step in range(50):
        values["loss"] = step
        tracker.log(values, step=step)
    tracker.finish()
    assert tracker.rows == [(step, {"loss": step}) for step in range(50)]
    assert tracker.finished


def test_a_stuck_tracker_costs_the_trainer_nothing(tracker, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "QUEUE", 1000)
    tracker.stuck.clear()
    begun = time.monotonic()
    for step in range(1500):
        tracker.log({"loss": 0.5}, step=step)
    assert time.monotonic() - begun < 1
    tracker.finish()
    assert time.monotonic() - begun < 3
    said = capsys.readouterr().err
    assert said.count("takes nothing any more") == 1
    assert "waited 0.5 s for tracker toy to take what was logged; left behind" in said


def accelerator(log_with=("wandb",), main=True):
    return SimpleNamespace(log_with=list(log_with), trackers=[], is_main_process=main)


def started(init):
    module = ModuleType("library.train_util")
    module.prepare_accelerator, module.init_trackers = (lambda args: args), init
    trackers.apply(module)
    return module


def test_wandb_is_tried_once_more_offline(monkeypatch, capsys):
    monkeypatch.setenv("HANGPROOF_TRACKER_TIMEOUT_S", "0.3")
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def init(accelerator, args, name):
        if os.environ.get("WANDB_MODE") != "offline":
            time.sleep(30)
        accelerator.trackers.append(Tracker())

    asked = accelerator()
    started(init).init_trackers(asked, None, "run")
    assert len(asked.trackers) == 1
    assert "waited 0.3 s for trackers to start (wandb); the run goes on offline" in capsys.readouterr().err
    monkeypatch.delenv("WANDB_MODE")


def test_a_tracker_that_fails_to_start_is_left_out(capsys):
    def init(accelerator, args, name):
        accelerator.trackers.append(Tracker())
        raise ConnectionError("no route")

    asked = accelerator(["tensorboard"])
    started(init).init_trackers(asked, None, "run")
    assert asked.trackers == [] and "ConnectionError: no route; the run goes on offline" in capsys.readouterr().err


def test_only_rank_0_tracks_and_the_key_goes_to_wandb_without_a_login(monkeypatch):
    module = started(lambda *a: None)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("RANK", "1")
    args = module.prepare_accelerator(SimpleNamespace(log_with="wandb", logging_dir="logs", wandb_api_key="k"))
    assert (args.log_with, args.logging_dir) == (None, None) and "WANDB_API_KEY" not in os.environ
    monkeypatch.setenv("RANK", "0")
    args = module.prepare_accelerator(SimpleNamespace(log_with="wandb", logging_dir="logs", wandb_api_key="k"))
    assert (args.log_with, args.wandb_api_key, os.environ.pop("WANDB_API_KEY")) == ("wandb", None, "k")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv("HANGPROOF_HUB_TIMEOUT_S", "0.6")
    monkeypatch.setattr(hub, "POLL_S", 0.05)
    monkeypatch.setattr(hub, "PAUSE_S", 0.01)


def test_a_slow_download_goes_on_as_long_as_bytes_come(tmp_path, impatient):
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)

    def download():
        for _ in range(10):
            with open(blobs / "x.incomplete", "ab") as file:
                file.write(b"x" * 1000)
            time.sleep(0.2)
        return "path"

    assert hub.watched(download, tmp_path, "a file") == "path"


def test_a_download_that_stands_still_ends_the_process(tmp_path):
    script = (
        "import time; from pathlib import Path; from sd_scripts_patches import hub\n"
        f"hub.watched(lambda: time.sleep(60), Path({str(tmp_path)!r}), 'model.bin of a/b')"
    )
    env = {**os.environ, "HANGPROOF_HUB_TIMEOUT_S": "0.5"}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=30
    )
    assert ended.returncode == 75 and "waited 0.5 s for a byte of model.bin of a/b" in ended.stderr


def test_errors_of_the_network_are_tried_again_and_a_missing_file_is_not(tmp_path, impatient, capsys):
    tries = []

    def flaky():
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("reset")
        return "path"

    assert hub.watched(flaky, tmp_path, "a file") == "path" and len(tries) == 3
    assert "a file: ConnectionError: reset; trying again (2 of 3)" in capsys.readouterr().err

    class Missing(OSError):
        response = SimpleNamespace(status_code=404)

    def missing():
        tries.append(1)
        raise Missing("no such file")

    tries.clear()
    with pytest.raises(Missing):
        hub.watched(missing, tmp_path, "a file")
    assert len(tries) == 1


def test_a_cached_file_is_taken_without_a_request(tmp_path, monkeypatch):
    """The real client, against an address where nobody listens."""
    download = pytest.importorskip("huggingface_hub.file_download")
    name, commit = "models--some--model", "a" * 40
    snapshot = tmp_path / name / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / name / "refs").mkdir()
    (tmp_path / name / "refs" / "main").write_text(commit)
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise ConnectionError("no network here")

    monkeypatch.setattr(hub, "PAUSE_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(download, "hf_hub_download", refuse)
        hub.apply_to_download(download)
        found = download.hf_hub_download("some/model", "config.json", cache_dir=str(tmp_path))
        assert Path(found) == snapshot / "config.json" and not asked
        with pytest.raises(ConnectionError):
            download.hf_hub_download("some/model", "other.json", cache_dir=str(tmp_path))
        assert len(asked) == 3


def test_phases_nest_and_come_back():
    beat = session.heartbeat()
    beat.phase("step")
    with session.phase("save"):
        with session.phase("hash"):
            assert beat.current_phase == "hash"
        assert beat.current_phase == "save"
    assert beat.current_phase == "step"


def test_a_phase_that_fails_is_where_the_run_ended():
    beat = session.heartbeat()
    beat.phase("step")
    with pytest.raises(OSError), session.phase("save"):
        raise OSError("disk full")
    assert beat.current_phase == "save"
    beat.phase("step")


def test_a_flag_wins_over_the_environment_and_reaches_children(monkeypatch):
    monkeypatch.setenv("HANGPROOF_NPZ_TIMEOUT_S", "7")
    assert timeouts.seconds("npz_timeout_s") == 7
    rest = timeouts.take_flags(["--lr", "1", "--hangproof_npz_timeout_s=9", "--hangproof_git_timeout_s", "2"])
    assert rest == ["--lr", "1"]
    assert timeouts.seconds("npz_timeout_s") == 9 and os.environ["HANGPROOF_GIT_TIMEOUT_S"] == "2"
    monkeypatch.delenv("HANGPROOF_GIT_TIMEOUT_S")
    assert timeouts.seconds("git_timeout_s") == timeouts.TABLE["git_timeout_s"][0]
