"""What the buttons of a run do: requests between two steps, a pause, and places in the queue."""

import json

import pytest
from ui_helpers import write_run

from guards import step_requests
from monitor import run_queue
from monitor.process.locks import LOCK, Lock
from runs.files import RunError
from ui.run import actions, queue, view


@pytest.fixture
def folder(data, monkeypatch):
    """A run whose monitor looks alive. No process starts what waits in the queue."""
    monkeypatch.setattr(run_queue, "ensure_worker", lambda: False)
    monkeypatch.setattr(queue, "_checked_s", 0.0)
    made = write_run(data, eta_s=60)
    (made / "sample_prompts.txt").write_text("a cat\n")
    (made / "train.sh").write_text("")
    lock = Lock(made / LOCK)
    assert lock.acquire()
    yield made
    lock.release()


def allowed(folder, **status) -> list[str]:
    if status:
        (folder / "status.json").write_text(json.dumps(status))
    return actions.value(view.read(folder))["do"]


def test_what_can_be_done_follows_the_state(folder, data):
    assert allowed(folder) == ["sample", "save", "pause"] and allowed(folder, state="stopping") == []
    with (folder / "run.toml").open("a") as file:
        file.write("sample_every_n_steps = 0\n")
    assert allowed(folder, state="running") == ["save", "pause"] and allowed(folder, state="restarting") == ["pause"]
    ended = write_run(data, "ended", state="completed")
    assert allowed(ended) == [] and allowed(ended, state="failed") == ["queue"] == allowed(ended, state="paused")
    run_queue.add(ended)
    assert allowed(ended) == ["now", "cancel"] and actions.value(view.read(ended))["position"] == 1
    assert actions.value(None)["do"] == []


def test_a_request_waits_until_the_training_has_answered_it(folder):
    made = actions.run_action({"run": folder.name, "do": "sample"})
    assert made["ok"] and actions.run_action({"run": folder.name, "do": "sample"})["id"] == made["id"], (
        "it waits already"
    )
    shown = actions.value(view.read(folder))
    assert shown["waiting"] == ["sample"] and shown["answer"] is None
    step_requests.path_of(folder, "sample").unlink()
    step_requests.append_event(folder, step_requests.EVENT, "1 sample image", id=made["id"], done=True)
    shown = actions.value(view.read(folder))
    assert shown["waiting"] == [] and shown["answer"] == {"id": made["id"], "done": True, "message": "1 sample image"}


def test_a_pause_is_asked_of_the_monitor_and_a_wrong_action_is_refused(folder, data):
    assert actions.run_action({"run": folder.name, "do": "pause"}) == {"ok": True}
    assert json.loads((folder / "stop.request").read_text())["pause"] is True
    for run, do in ((folder.name, "rm"), (write_run(data, "ended", state="stopped").name, "save")):
        answer = actions.run_action({"run": run, "do": do})
        assert answer["ok"] is False and len(answer["error"]) > 10


def test_the_queue_is_shown_and_changed(folder, data):
    for name in ("dog", "owl"):
        run_queue.add(write_run(data, name, state="stopped", step=10, step_s=2.0))
    shown = queue.value(view.read_all())
    assert [(one["run"], one["starts_s"]) for one in shown["entries"]] == [("dog", 60), ("owl", 240)]
    answer = queue.queue_action({"do": "move", "run": "owl", "to": 1})
    assert answer["ok"] and [one.run for one in run_queue.read().entries] == ["owl", "dog"]
    assert queue.queue_action({"do": "cancel", "run": "dog"})["ok"]
    for wrong in ({"do": "cancel", "run": "dog"}, {"do": "move", "run": "owl", "to": True}, {"do": "rm", "run": "owl"}):
        assert queue.queue_action(wrong)["ok"] is False
    assert [one.run for one in run_queue.read().entries] == ["owl"]
    queue.follow_delete("owl")
    assert run_queue.read().entries == ()
    with pytest.raises(RunError):
        queue.change("now", "owl")
