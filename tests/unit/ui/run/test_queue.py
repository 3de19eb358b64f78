"""The queue as the page shows it, and what its buttons do."""

import pytest
from ui_helpers import write_run

from jobs import queue as run_queue
from runs.files import RunError
from ui.run import actions, view


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
