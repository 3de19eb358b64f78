"""Saves by a thread, from copies in memory: in order, with the training's errors, completed by the next process."""

import json
import threading
from unittest.mock import Mock

import pytest
from monitor_helpers import events
from snapshot_helpers import raw, writer

from guards import reading, state_saves
from guards.heartbeat import Heartbeat
from guards.snapshots import Snapshots
from guards.state_saves import StateSaves

pytestmark = pytest.mark.skipif(not state_saves.os.path.isdir("/dev/shm"), reason="no /dev/shm")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_saves_are_written_in_order_from_copies_that_go_when_all_of_them_are_on_the_disk(ring):
    phases, done, written = [], threading.Event(), []
    saves = StateSaves(writer(ring), Heartbeat(None, inject=lambda name, *_: phases.append(name)))

    def write(files):
        done.wait(60)
        written.append((files[0].content, threading.current_thread().name, names(ring)))

    saves.beat.phase("step")
    saves.begin(1)
    saves.save("a-state", 1, 1, raw(b"one"), write, {"x": 1})
    saves.save("b-state", 1, 1, raw(b"two"), write)
    saves.then("old files", lambda: written.append("old files"))
    saves.begin(1)  # of the same step: nothing is waited for
    copies = ["save-1", "save-2"]
    assert saves.busy and names(ring) == copies and not written and phases == ["step"]
    guard = json.loads((ring / "save-1/hangproof.json").read_text())
    assert (guard["name"], guard["step"], guard["epoch"], guard["belongs"]) == ("a-state", 1, 1, {"x": 1})
    done.set()
    saves.wait()
    assert written == [(b"one", state_saves.THREAD, copies), (b"two", state_saves.THREAD, copies), "old files"]
    assert not saves.busy and not names(ring) and {*phases} <= {"step", "save"} and phases[-1] == "step"
    saves.then("more", lambda: written.append(threading.current_thread().name))
    assert written[-1] == "MainThread"


def test_after_a_save_that_failed_nothing_is_saved_and_the_training_gets_the_error(ring, capsys):
    saves, written = StateSaves(writer(ring), Heartbeat(None)), []
    saves.save("a-state", 1, 1, raw(b"one"), Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        saves.wait()
    saves.save("b-state", 1, 1, raw(b"two"), written.append)
    for act in (saves.wait, lambda: saves.begin(2), lambda: saves.then("x", written.clear), saves.__enter__().check):
        with pytest.raises(OSError, match="No space left"):
            act()
    with pytest.raises(KeyError), saves:
        raise KeyError
    assert "hangproof: a-state was not saved: [Errno 28]" in capsys.readouterr().out
    with pytest.raises(OSError, match="No space left"), saves:
        pass
    assert not written and names(ring) == ["save-1", "save-2"]


def test_what_a_process_could_not_complete_is_written_by_the_next_one_of_the_same_run(ring, capsys):
    before, written = StateSaves(writer(ring), Heartbeat(None)), []
    for number, (step, text) in enumerate([(1, b"one"), (1, b"two"), (2, b"damaged"), (9, b"later")], 1):
        assert before._copy(f"{number}-state", step, 1, raw(text), None).name == f"save-{number}"
    StateSaves(writer(ring, run="/runs/b"), Heartbeat(None))._copy("other-state", 1, 1, raw(b"other"), None)
    (ring / "save-3/files.pickle").write_bytes(b"x")
    with StateSaves(writer(ring), Heartbeat(None)) as saves:
        saves.redo(2, lambda guard, files: written.append((guard["name"], guard["step"], files[0].content)))
    assert written == [("1-state", 1, b"one"), ("2-state", 1, b"two")] and not names(ring)
    said = capsys.readouterr().out
    assert said.count("was being saved when the training ended; it is completed") == 2
    assert "3-state was being saved when the training ended; it is lost: files.pickle: truncated" in said
    assert "4-state" not in said and "other-state" not in said


@pytest.mark.parametrize("off", [True, False], ids=["without snapshots", "without room"])
def test_where_no_copy_has_room_the_training_writes_it_and_says_so_once(ring, tmp_path, monkeypatch, capsys, off):
    saves, written = StateSaves(Snapshots(None) if off else writer(ring, run=str(tmp_path)), Heartbeat(None)), []
    monkeypatch.setattr(reading, "available_bytes", lambda: 0)
    for text in (b"one", b"two"):
        saves.save("a-state", 1, 1, raw(text), lambda files: written.append((files[0].content, saves.busy)))
    assert written == [(b"one", False), (b"two", False)] and not names(ring)
    said = "saves wait for the disk: a-state has no room in memory: a copy of the state has 0 MB, and the machine"
    assert capsys.readouterr().out.count(said) == (not off)
    assert [event["kind"] for event in events(tmp_path)] == ([] if off else ["slow_save"])


def test_a_step_that_saves_before_the_last_save_is_written_waits_for_it_and_says_so_once(ring, monkeypatch, capsys):
    monkeypatch.setattr(state_saves, "SLOW_AGE_S", 0.0)
    monkeypatch.setattr(state_saves, "BEAT_POLL_S", 0.01)
    waits, done = [], threading.Event()

    def inject(name, step, beat):
        if name == "save" and not beat.record.done:
            waits.append(step)
            if len(waits) % 2 == 0:  # the wait after the message
                done.set()

    saves = StateSaves(writer(ring), Heartbeat(None, inject=inject))
    for step in (1, 2, 3):
        saves.begin(step)
        done.clear()
        saves.save(f"{step}-state", step, 1, raw(b"x"), lambda files: done.wait(60))
    done.set()
    saves.wait()
    said = capsys.readouterr().out
    warning = "hangproof: 1-state, of step 1, is still being written when step 2 saves: the disk is slower"
    assert said.startswith(warning) and said.count("is still being written") == 1
