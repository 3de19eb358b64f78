"""The progress in the log, and the phase in which trackers finish."""

from types import SimpleNamespace

from sd_scripts_patches import heartbeat, session


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


def test_a_validation_before_the_first_step_of_a_resumed_run_is_that_of_the_step_before(monkeypatch, capsys):
    monkeypatch.setattr(session, "run", SimpleNamespace(step=12))
    loop = heartbeat.TrainingLoop(SimpleNamespace())
    loop.validation_losses.append(0.5)
    loop.record_validation()
    assert capsys.readouterr().err == "hangproof: validation loss at step 12: 0.5\n"


def test_the_trackers_finish_in_phase_end():
    """In phase "step" the monitor would take it for a hung step."""
    beat, phases = session.heartbeat(), []
    beat.phase("step")
    heartbeat._in_phase_end(lambda accelerator: phases.append(beat.current_phase))(None)
    assert phases == ["end"]
