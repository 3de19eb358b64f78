"""The heartbeat, its writer and its reader, across real processes."""

import errno
import math
import os
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings, strategies as st
from seeds import examples

from guards import heartbeat
from guards.heartbeat import POINTS, Heartbeat, HeartbeatError, path_of, read, read_all, set_request


@given(note=st.text(max_size=600))
@settings(max_examples=examples(30))
def test_any_note_is_cut_between_characters(tmp_path_factory, note):
    folder = tmp_path_factory.mktemp("hb")
    writer = Heartbeat(path_of(folder, 0))
    writer.phase("load", note=note)
    kept = read(path_of(folder, 0)).note
    clean = note.encode("utf-8", "replace").decode("utf-8")
    assert clean.startswith(kept)
    assert kept == clean or len(kept.encode()) > 236


def test_without_a_folder_nothing_is_written_and_else_a_record_that_nobody_else_may_read(tmp_path, monkeypatch):
    monkeypatch.delenv("HANGPROOF_HEARTBEAT", raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # as a container's template leaves them
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    writer = Heartbeat.from_env()
    writer.phase("load")
    writer.step(1, loss=math.nan)
    assert writer.request == heartbeat.REQUEST_NONE
    assert list(tmp_path.iterdir()) == []
    record = path_of(tmp_path / "heartbeats", 0)
    Heartbeat(record)
    assert (record.parent.stat().st_mode & 0o777, record.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_record_is_neither_open_nor_mapped_when_it_is_renamed_and_a_reader_keeps_the_old_one(tmp_path, monkeypatch):
    """Windows refuses to rename a file that is open or mapped, so no training started there."""
    used = []
    replace = os.replace

    def checked(source, target):
        numbers = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
        open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in numbers]
        used.append((str(source) in open_files, str(source) in Path("/proc/self/maps").read_text()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", checked)
    writer = Heartbeat(path_of(tmp_path, 0))
    assert used == [(False, False)]
    writer.step(3)
    assert read(path_of(tmp_path, 0)).step == 3
    assert [p.name for p in tmp_path.iterdir()] == ["rank-0.hb"]
    with open(path_of(tmp_path, 0), "rb") as file:
        Heartbeat(path_of(tmp_path, 0)).step(7)
        writer.step(4)
        assert heartbeat._parse(file.read(heartbeat.SIZE), "old").step == 4
    assert read(path_of(tmp_path, 0)).step == 7


def test_a_record_that_is_written_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    writer, real = Heartbeat(path_of(tmp_path, 2)), heartbeat._parse

    def parse(data, path):
        if writer.record.step < 3:
            writer.step(writer.record.step + 1)
        return real(data, path)

    monkeypatch.setattr(heartbeat, "_parse", parse)
    assert read(path_of(tmp_path, 2)).step == 3


def test_a_foreign_file_is_refused_by_name_and_a_folder_that_cannot_be_listed_is_empty(tmp_path, monkeypatch):
    path_of(tmp_path, 0).write_bytes(b"x" * heartbeat.SIZE)
    with pytest.raises(HeartbeatError, match=r"rank-0\.hb"):
        read(path_of(tmp_path, 0))
    assert read_all(tmp_path) == []
    Heartbeat(path_of(tmp_path, 0))
    assert len(read_all(tmp_path)) == 1
    monkeypatch.setattr(os, "listdir", Mock(side_effect=OSError(errno.ESTALE, "stale")))
    assert read_all(tmp_path) == []


def test_a_torn_record_is_refused_and_left_out_and_ranks_come_in_order(tmp_path):
    for rank in (10, 9, 2):
        Heartbeat(path_of(tmp_path, rank), rank, 11).step(rank)
    wrong = {"phase": 99, "outcome": 99, "note_bytes": 999, "point": 99, "about_bytes": 9999, "sequence": 1}
    for name, value in wrong.items():
        setattr(Heartbeat(path_of(tmp_path, 3), 3).record, name, value)
        with pytest.raises(HeartbeatError, match="torn"):
            read(path_of(tmp_path, 3))
    (tmp_path / "rank-x.hb").write_bytes(path_of(tmp_path, 2).read_bytes())
    assert [(beat.rank, beat.step, beat.world) for beat in read_all(tmp_path)] == [(2, 2, 11), (9, 9, 11), (10, 10, 11)]


def test_a_signal_requests_a_stop_only_when_a_step_can_be_saved_and_never_over_the_monitors(tmp_path):
    writer = Heartbeat(path_of(tmp_path, 0))
    assert not writer.request_stop() and writer.request == heartbeat.REQUEST_NONE
    writer.step(1)
    assert writer.request_stop() and writer.request == heartbeat.REQUEST_STOP
    assert read(path_of(tmp_path, 0)).request == heartbeat.REQUEST_TERM
    set_request(path_of(tmp_path, 0), heartbeat.REQUEST_STOP)
    assert writer.request_stop() and read(path_of(tmp_path, 0)).request == heartbeat.REQUEST_STOP


def test_a_phase_counts_from_zero_a_step_from_its_beginning_and_a_failure_keeps_its_phase(tmp_path, monkeypatch):
    seen, now_s = [], [1000.0]
    writer = Heartbeat(path_of(tmp_path, 0), inject=lambda *what: seen.append(what[:2]))
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now_s[0])
    writer.plan(40)
    for phase in ("load", "first_step"):
        now_s[0] += 100
        writer.phase(phase, total=9)
        writer.item(5, note="bär.png")
        beat = read(path_of(tmp_path, 0))
        assert (beat.phase, beat.done, beat.total, beat.note, beat.planned) == (phase, 5, 9, "bär.png", 40)
        assert (beat.step, beat.count, beat.step_s, beat.outcome, beat.pid) == (0, 0, 0.0, "running", os.getpid())
    now_s[0] += 3
    writer.step(21, epoch=3, loss=0.5, lr=1e-4)
    beat = read(path_of(tmp_path, 0))
    assert (beat.phase, beat.step, beat.count, beat.epoch, beat.loss, beat.lr) == ("step", 21, 1, 3, 0.5, 1e-4)
    assert beat.intervals == (3.0,) and (beat.done, beat.total, beat.phase_s, beat.step_s) == (0, 0, 1203.0, 1203.0)
    now_s[0] += 2
    writer.step(2)
    writer.waited(0.5)
    writer.waited(0.25)
    now_s[0] += 10
    writer.phase("sample", total=4, note="x")
    writer.item(3)
    writer.end("failed", "the reason")
    beat = read(path_of(tmp_path, 0))
    assert (beat.phase, beat.phase_s, beat.beat_s, beat.step_s) == ("sample", 1215.0, 1215.0, 1205.0)
    assert (beat.outcome, beat.note, beat.done, beat.total, beat.waited_s) == ("failed", "the reason", 3, 4, 0.75)
    writer.end("stopped")
    assert (read(path_of(tmp_path, 0)).phase, beat.intervals) == ("end", (3.0, 2.0))
    assert seen[:4] == [("load", 0), ("load", 0), ("first_step", 0), ("first_step", 0)]
    assert seen[4:] == [("step", 21), ("step", 2), ("sample", 2), ("sample", 2)]
    for step in range(1, 301):
        now_s[0] += step
        writer.step(step)
    assert read(path_of(tmp_path, 0)).intervals == tuple(range(45, 301)), "the last 256, oldest first"


def test_the_reason_of_a_failure_has_the_name_and_not_the_value_of_a_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "0123 secret")
    Heartbeat(path_of(tmp_path, 0)).end("failed", "ValueError: no such key: '0123 secret'")
    assert read(path_of(tmp_path, 0)).note == "ValueError: no such key: '(MY_API_KEY)'"


def test_a_reader_sees_when_each_check_point_was_reached_and_how_long_it_took(tmp_path):
    """One that begins again keeps its first time and adds up what it took; an unknown one is ignored.

    The first step has passed what the run does not use.
    """
    began_s = time.monotonic()
    writer = Heartbeat(path_of(tmp_path, 0))
    assert read(path_of(tmp_path, 0)).point == ""
    for name in ("arguments", "lunch", "data", "model", "data", "network"):
        writer.reach(name)
        time.sleep(0.02)
    beat = read(path_of(tmp_path, 0))
    reached, spent = (dict(zip(POINTS, row, strict=True)) for row in (beat.reached, beat.spent))
    assert beat.point == "network"
    assert began_s <= reached["arguments"] < reached["data"] < reached["model"] < reached["network"] == beat.point_s
    assert {name for name, at_s in reached.items() if at_s} == {"arguments", "data", "model", "network"}
    assert spent["data"] >= 0.04 and spent["model"] >= 0.02 and spent["network"] == 0.0, spent
    assert not beat.reached[POINTS.index("tracker")]
    writer.reach("first_step")
    beat = read(path_of(tmp_path, 0))
    assert all(beat.reached[:-1]) and not beat.reached[-1]
    assert beat.reached[POINTS.index("tracker")] == beat.point_s


SECRET = "0123456789abcdef0123456789abcdef01234567"
SHOWN = {"RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO"}
SHOWN |= {"NCCL_SOCKET_IFNAME": "", "WANDB_MODE": "offline", "HANGPROOF_NPZ_TIMEOUT_S": "60"}
HIDDEN = {"WANDB_API_KEY": SECRET, "WANDB_NOTES": f"my key is {SECRET}", "WANDB_IDENTITY_TOKEN_FILE": "/tmp/x"}
HIDDEN |= {"WANDB_BASE_URL": "https://me:pass@wandb.example"}


def test_the_environment_is_shown_without_secrets(tmp_path, monkeypatch):
    for name in list(os.environ):
        if heartbeat.SHOWN.fullmatch(name):
            monkeypatch.delenv(name)
    for name, value in {**SHOWN, **HIDDEN, "HOME": "/root"}.items():
        monkeypatch.setenv(name, value)
    Heartbeat(path_of(tmp_path, 2), rank=2, world=4).describe("cpu", "gloo")
    beat = read(path_of(tmp_path, 2))
    assert (beat.local_rank, beat.about["device"], beat.about["backend"]) == (1, "cpu", "gloo")
    assert beat.about["environment"] == SHOWN | dict.fromkeys(HIDDEN, heartbeat.HIDDEN)
    raw = path_of(tmp_path, 2).read_bytes()
    assert SECRET.encode() not in raw and b"me:pass" not in raw


def test_a_large_environment_fits(tmp_path, monkeypatch):
    for i in range(300):
        monkeypatch.setenv(f"NCCL_X{i}", "ü" * 500)
    Heartbeat(path_of(tmp_path, 0)).step(1)
    beat = read(path_of(tmp_path, 0))
    assert beat.step == 1 and beat.about["host"] == os.uname().nodename
    assert len(beat.about["environment"]) >= 5
