"""Trackers beside the training: their queue, their start, and who has one."""

import os
import threading
import time
from types import ModuleType, SimpleNamespace

import accelerate
import patches_helpers as helpers
import pytest

from sd_scripts_patches import resume, session, trackers, trainer_state


class Tracker:
    """Keeps its entries. While `stuck` is clear, calls wait."""

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
    trackers.decouple(made)
    yield made
    made.stuck.set()


def test_entries_arrive_in_order_and_as_they_were_when_logged_and_the_end_has_a_limit(tracker, capsys):
    values = {"loss": 0}
    for step in range(50):
        values["loss"] = step
        tracker.log(values, step=step)
    tracker.finish()
    assert tracker.rows == [(step, {"loss": step}) for step in range(50)]
    assert tracker.finished
    tracker.stuck.clear()
    tracker.finish()
    assert "waited 0.5 s for tracker toy to finish; continuing without it" in capsys.readouterr().err


def test_a_stuck_tracker_costs_the_trainer_nothing(tracker, capsys):
    tracker.stuck.clear()
    start = time.monotonic()
    for step in range(1500):
        tracker.log({"loss": 0.5}, step=step)
    tracker.finish()
    assert time.monotonic() - start < 25, "the tracker itself waits 30 s for each entry"
    log = capsys.readouterr().err
    assert log.count("does not respond; the run continues and drops its entries") == 1
    assert "waited 0.5 s for tracker toy to log its last entries; continuing without it" in log


def patched_module(init):
    module = ModuleType("library.train_util")
    module.prepare_accelerator, module.init_trackers = (lambda args: args), init
    helpers.apply(trackers.PATCH, module)
    return module


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_a_tracker_that_does_not_start_is_started_once_more_offline_or_left_out(monkeypatch, capsys, fault):
    monkeypatch.setenv("HANGPROOF_TRACKER_TIMEOUT_S", "0.3")
    monkeypatch.setenv("WANDB_MODE", "")  # so that what is set here is removed again
    monkeypatch.delenv("WANDB_MODE")

    goes_on, late = threading.Event(), threading.Event()

    def init(accelerator, args, name):
        online = os.environ.get("WANDB_MODE") != "offline"
        if fault == "hangs" and online:
            goes_on.wait(30)
        accelerator.trackers.append(Tracker())
        late.set() if online else None
        if fault == "fails":
            raise ConnectionError("no route")

    names = ["wandb"] if fault == "hangs" else ["tensorboard"]
    made = SimpleNamespace(log_with=names, trackers=[], is_main_process=True, logging_dir=None)
    patched_module(init).init_trackers(made, None, "run")
    goes_on.set()
    assert late.wait(30) and len(made.trackers) == (fault == "hangs"), "also when the first one starts after all"
    reason = "waited 0.3 s for trackers to start (wandb)" if fault == "hangs" else "ConnectionError: no route"
    assert f"{reason}; the run continues offline" in capsys.readouterr().err


def test_a_resumed_run_goes_on_in_the_folder_of_logs_of_its_first_attempt(monkeypatch, tmp_path):
    """TensorBoard draws a curve for each folder, and kohya's trainers name one by the time of the start."""
    module = patched_module(lambda accelerator, *args: accelerator.trackers.append(Tracker()))
    folders = []
    for start in ("first", "second", "third"):
        run = resume.Run()
        monkeypatch.setattr(session, "run", run)
        run.accelerator = accelerate.Accelerator(cpu=True, project_dir=f"{tmp_path}/{start}")
        run.accelerator.log_with = ["toy"]
        if folders:
            run._load(tmp_path)
        module.init_trackers(run.accelerator, None, "run")
        folders.append(run.accelerator.logging_dir)
        run.args, run.loader = SimpleNamespace(seed=1), SimpleNamespace(num_workers=1)
        counts = dict.fromkeys(("step", "epoch", "batch", "batches", "accumulation", "processes", "workers"), 1)
        trainer_state.write(tmp_path, trainer_state.TrainerState(epoch_over=False, extra=run._extra(), **counts))
    assert folders == [f"{tmp_path}/first"] * 3


def test_only_rank_0_tracks_and_the_key_goes_to_wandb_without_a_login(monkeypatch):
    module = patched_module(lambda *a: None)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("RANK", "1")
    args = module.prepare_accelerator(SimpleNamespace(log_with="wandb", logging_dir="logs", wandb_api_key="k"))
    assert (args.log_with, args.logging_dir) == (None, None) and "WANDB_API_KEY" not in os.environ
    monkeypatch.setenv("RANK", "0")
    args = module.prepare_accelerator(SimpleNamespace(log_with="wandb", logging_dir="logs", wandb_api_key="k"))
    assert (args.log_with, args.wandb_api_key, os.environ.pop("WANDB_API_KEY")) == ("wandb", None, "k")
