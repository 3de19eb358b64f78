"""What the buttons of a run do: requests between two steps, a pause, and places in the queue."""

import json
import shutil
import sys

import pytest
from ui_helpers import watched, write_run

from guards import step_requests
from jobs import queue as run_queue
from runs.files import RunError
from ui.run import actions, view


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
    with (folder / "run.toml").open("a") as file:
        file.write("sample_every_n_steps = 0\n")
    assert allowed(folder, state="running") == ["save", "pause"] and allowed(folder, state="restarting") == ["pause"]
    ended = write_run(data, "ended", state="completed")
    assert allowed(ended) == [] and allowed(ended, state="failed") == ["queue"] == allowed(ended, state="paused")
    run_queue.insert(ended)
    assert allowed(ended) == ["now", "cancel"]
    assert "Waits in the queue, position 1." in actions.html(view.read(ended))


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
