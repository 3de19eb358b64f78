"""The progress in the log, phases within phases, and the one in which trackers finish."""

import re
from types import SimpleNamespace

import pytest
import torch

from guards.crash import EXIT_STOPPED
from guards.heartbeat import REQUEST_STOP
from sd_scripts_patches import exit as exit_patch, heartbeat, session
from sd_scripts_patches.musubi import heartbeat as musubi


def test_once_a_minute_the_log_shows_the_progress(monkeypatch, capsys):
    clock = [1000.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(session, "nested_phase_end_s", 0.0)

    def train(every):
        monkeypatch.setenv("HANGPROOF_PROGRESS_LINE_S", every)
        loop = heartbeat.TrainingLoop(SimpleNamespace(max_train_steps=100))
        for step in range(1, 101):
            clock[0] += 2.0
            loop.losses.append(0.25)
            loop.record_step(step)
            loop.step_start_s = clock[0]
        return capsys.readouterr().err.splitlines()

    lines = train("")
    assert lines == [f"hangproof: step {n} of 100, epoch 0, loss 0.25, 2.00 s per step" for n in (30, 60, 90)]
    assert len(train("20")) == 10 and train("0") == []


def test_the_learning_rate_is_known_also_of_a_schedule_without_get_last_lr(monkeypatch):
    """REXScheduler of pytorch_optimizer: the run ended at its first step."""
    weight = torch.nn.Parameter(torch.ones(1))
    schedule = SimpleNamespace(optimizer=torch.optim.SGD([weight], lr=0.5))
    monkeypatch.setattr(heartbeat, "_scheduler", schedule)
    loop = heartbeat.TrainingLoop(SimpleNamespace(max_train_steps=1))
    loop.process_batch(lambda: weight * 2)
    assert (loop.lr, loop.losses) == (0.5, [2.0])


def test_each_validation_has_its_own_mean_and_one_before_the_first_step_of_a_resumed_run_is_that_of_the_step_before(
    monkeypatch, capsys
):
    monkeypatch.setattr(session, "run", SimpleNamespace(step=12))
    loop = heartbeat.TrainingLoop(SimpleNamespace())
    for losses in ([0.25, 0.75], [1.5]):
        loop.validation_losses += losses
        loop.record_validation()
    assert re.findall("validation loss at step 12: (.*)", capsys.readouterr().err) == ["0.5", "1.5"]


def test_a_validation_is_recorded_before_the_state_that_says_that_it_is_over(monkeypatch, capsys):
    """A kill while that state, the samples of the epoch or the last LoRA were made lost the result."""
    monkeypatch.setattr(session, "run", SimpleNamespace(step=12))
    loop = heartbeat.TrainingLoop(SimpleNamespace())
    monkeypatch.setattr(heartbeat, "_training", loop)
    loop.validation_losses.append(0.5)
    recorded = heartbeat.at_point(phase="save")(lambda: capsys.readouterr().err)()
    assert recorded == "hangproof: validation loss at step 12: 0.5\n"


def test_the_trackers_finish_in_phase_end():
    """In phase "step" the monitor would take it for a hung step."""
    beat, phases = session.heartbeat(), []
    beat.phase("step")
    heartbeat._in_phase_end(lambda accelerator: phases.append(beat.current_phase))(None)
    assert phases == ["end"]


def test_phases_nest_and_the_record_keeps_the_one_that_failed():
    beat = session.heartbeat()
    beat.phase("step")
    with session.phase("save"):
        with session.phase("hash"):
            assert beat.current_phase == "hash"
        assert beat.current_phase == "save"
    assert beat.current_phase == "step"
    with pytest.raises(OSError), session.phase("save"):
        raise OSError("disk full")
    assert beat.current_phase == "save"
    beat.phase("step")


def test_a_caching_command_of_musubi_tuner_reports_its_items_and_stops_on_request_between_two_batches(monkeypatch):
    done, ended, beat = [], [], SimpleNamespace(request="")
    beat.item = done.append
    monkeypatch.setattr(session, "heartbeat", lambda: beat)
    monkeypatch.setattr(exit_patch, "exit_process", lambda *outcome: ended.append(outcome))
    for number, _ in enumerate(musubi._count_items(list)([["a", "b"], ("bucket", ["c"])])):
        beat.request = REQUEST_STOP if number else ""
    note = "stopped after 3 cache files; --skip_existing continues from there"
    assert done == [2, 3] and ended == [(EXIT_STOPPED, "stopped", note)]
