"""What the buttons of a run do: requests between two steps, a pause, and places in the queue."""

import errno
import json
import shutil
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
from ui_helpers import watched, write_run

from guards import step_requests
from jobs import queue as run_queue
from runs.files import RunError
from ui.run import actions, cards, run_page, view


@pytest.fixture
def folder(data, monkeypatch):
    """A run whose monitor looks alive. No process starts what waits in the queue."""
    monkeypatch.setattr(run_queue, "ensure_worker", lambda: False)
    monkeypatch.setattr(actions, "_checked_s", 0.0)
    made = write_run(data, eta_s=60)
    (made / "sample_prompts.txt").write_text("a cat\n")
    (made / "train.sh").write_text("")
    with watched(made):
        yield made


def allowed(folder, **status) -> list[str]:
    if status:
        (folder / "status.json").write_text(json.dumps(status))
    shown = view.read(folder)
    assert actions.html(shown).count("data-do=") == len(actions.possible(shown))
    return actions.possible(shown)


def test_what_can_be_done_follows_the_state(folder, data):
    assert allowed(folder) == ["sample", "save", "pause"] and allowed(folder, state="stopping") == []
    kept = (folder / "sample_prompts.txt").rename(folder / "kept")
    assert allowed(folder, state="running") == ["save", "pause"], "there is nothing to draw"
    kept.rename(folder / "sample_prompts.txt")
    with (folder / "run.toml").open("a") as file:
        file.write("sample_every_n_steps = 0\n")
    assert allowed(folder, state="running") == ["save", "pause"] and allowed(folder, state="restarting") == ["pause"]
    ended = write_run(data, "ended", state="completed")
    assert allowed(ended) == [] and allowed(ended, state="failed") == ["queue"] == allowed(ended, state="paused")

    def can_start() -> bool:
        return run_page._buttons(view.read(ended))["go"]["visible"]

    assert can_start()
    run_queue.insert(ended)
    assert allowed(ended) == ["now", "cancel"] == allowed(ended, state="completed")
    assert "Waits in the queue, position 1." in actions.html(view.read(ended))
    allowed(ended, state="paused")
    assert not can_start(), "Start would do nothing"
    assert "Press" in cards.head(view.read(ended)) and "Press" not in cards.head(view.read(ended), waits=True)
    with run_queue.changing() as changed:
        changed.entries = [replace(changed.entries[0], problem="train.sh is gone")]
    assert can_start() and "train.sh is gone" in actions.html(view.read(ended))


def test_a_request_waits_until_the_training_has_answered_it(folder):
    made = actions.act(folder.name, "sample")
    assert actions.act(folder.name, "sample")["id"] == made["id"], "it waits already"
    assert "Sample now: requested." in actions.html(view.read(folder))
    step_requests.path_of(folder, "sample").unlink()
    step_requests.append_event(folder, step_requests.EVENT, "1 sample <image>", id=made["id"], done=True)
    shown = actions.html(view.read(folder))
    assert "requested" not in shown and "1 sample &lt;image&gt;." in shown


@pytest.mark.skipif(sys.platform != "linux", reason="Elsewhere, what a command prints needs a disk")
def test_a_stop_says_why_it_fails_also_where_no_disk_has_space(folder, monkeypatch):
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/dev/full"])
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(actions, "python", lambda *_: ["sh", "-c", "echo monitor: it does not run; exit 1"])
    with pytest.raises(RunError, match="^it does not run$"):
        actions.stop(folder)


def test_an_action_that_the_disk_does_not_take_says_why_and_what_to_do(folder, monkeypatch):
    monkeypatch.setattr(run_queue, "add", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(
        RunError, match="The action queue on .* was not stored: the disk or network drive cannot be read"
    ):
        actions.act(folder.name, "queue")


def test_a_pause_is_asked_of_the_monitor_and_a_wrong_action_is_refused(folder, data):
    assert actions.act(folder.name, "pause") == {}
    assert json.loads((folder / "stop.request").read_text())["pause"] is True
    assert "Pausing…" in actions.html(view.read(folder))
    for run, do in ((folder, "rm"), (write_run(data, "ended", state="stopped"), "save")):
        with pytest.raises(RunError, match=r".{10}"):
            actions.act(run.name, do)


def test_a_run_that_was_deleted_meanwhile_is_not_said_to_need_space(folder, monkeypatch):
    monkeypatch.setattr("monitor.cli.commands.ask_to_end", lambda run, _: (shutil.rmtree(run), (run / "x").touch()))
    with pytest.raises(RunError, match="It may have been deleted"):
        actions.act(folder.name, "pause")


@pytest.fixture
def waiting(data, monkeypatch):
    """Three runs that wait, and no process that starts them; the last one has a hostile name."""
    monkeypatch.setattr(run_queue, "ensure_worker", lambda: None)
    for name in ("one", "two", "three"):
        folder = write_run(data, name, state="stopped", step=10, step_s=2.0)
        if name == "three":
            (folder / "run.toml").write_text("name = '''<i onclick=x>\"''''")
        run_queue.insert(folder)
    return data


def order() -> list[str]:
    return [one.run for one in actions.entries()]


def test_the_queue_is_shown_in_order_as_text_and_its_buttons_move_and_cancel(waiting, monkeypatch):
    shown = actions.queue_html(view.read_all())
    places = [shown.index(f'<li class="" data-run="{name}"') for name in ("one", "two", "three")]
    assert "Queue (3)" in shown and places == sorted(places)
    assert "<i" not in shown and "&lt;i onclick=x&gt;" in shown
    assert "<ul" not in shown, "no list of sweeps where there is none"
    first, last = shown[: places[1]], shown[places[2] :]
    assert 'data-do="up" data-run="one"' in first and first.count('aria-disabled="true"') == 1
    assert last.partition('data-do="down"')[2].partition(">")[0].endswith('aria-disabled="true"')

    assert actions.act("three", "up") == {"message": "three: position 2 of 3"} and order() == ["one", "three", "two"]
    assert actions.act("one", "down") == {"message": "one: position 2 of 3"} and order() == ["three", "one", "two"]
    assert "left the queue" in actions.act("one", "cancel")["message"] and order() == ["three", "two"]
    for run, action in (("one", "up"), ("one", "now"), ("one", "cancel"), ("", "up"), ("two", ""), ("two", "delete")):
        with pytest.raises(RunError):
            actions.act(run, action)
    with monkeypatch.context() as patch:
        patch.setattr(run_queue, "cancel", lambda run: ["cat-r8"])
        assert "Stopping cat-r8." in actions.act("cat-sweep", "cancel")["message"], "the run of a sweep that trains"
    for run in ("two", "three"):
        run_queue.forget(run)
    assert actions.queue_html(view.read_all()) == "", "an empty queue takes no room"
