"""Small promises: a rehearsal starts its own job, a signal ends the container's loop, bytes are sent as they are."""

import math
import os
import signal
from unittest.mock import Mock, call

from launch_helpers import a_run

import runs
from launch import rehearse, serve
from launch.store import filesystems
from launch.store.places import open_place
from runs import job


def test_a_rehearsal_writes_a_job_of_its_own_steps(data, clean, monkeypatch):
    folder, run = a_run(data), data / "outputs" / rehearse.NAME
    stages = [rehearse.Stage(key, title) for key, (title, _) in rehearse.STAGES.items()]
    tried = Mock(busy="")
    tried.loop.at.state = rehearse.State.COMPLETED
    monkeypatch.setattr(rehearse, "Trial", lambda run, until_s, on_phase: tried)
    run.mkdir()
    work = rehearse.Work(folder, rehearse.Rehearsal(stages=stages), math.inf, run)
    assert work._try(runs.load(folder).changed(name=rehearse.NAME, max_train_steps=2)) is tried
    made = job.load(run)
    assert made is not None and made.run_spec().max_train_steps == 2
    assert str(run) in (run / runs.script_name()).read_text()


def test_a_signal_ends_the_loop_of_the_container(data, monkeypatch):
    rounds = []

    def keep_page(container):
        rounds.append(container)
        assert len(rounds) == 1, "the loop went on after SIGTERM"
        os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(serve, "POLL_S", 0.0)
    monkeypatch.setattr(serve.subprocess, "run", lambda *words, **more: None)
    monkeypatch.setattr(serve.Container, "_keep_page", keep_page)
    monkeypatch.setattr(serve.Container, "leave", lambda container: container.signals[0])
    try:
        assert serve.Container(1, {}).serve() == signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_bytes_and_small_files_are_sent_in_one_call_and_counted(tmp_path):
    (tmp_path / "x").write_bytes(b"file")
    place, moved, sent = open_place("s3://bucket"), [], Mock()
    place.write(sent, "bucket/bytes", b"bytes", moved.append)
    place.write(sent, "bucket/file", str(tmp_path / "x"), moved.append)
    assert moved == [5, 4]
    assert sent.pipe_file.call_args_list == [call("bucket/bytes", b"bytes"), call("bucket/file", b"file")]
    assert list(filesystems.blocks(b"abc")) == [b"abc"]
