"""The queue and the buttons of a run as the page shows them, and what a press does."""

import pytest
from ui_helpers import write_run

from monitor import run_queue
from monitor.process.locks import LOCK, Lock
from runs.files import RunError
from ui.run import actions, queue, view

MARK = "<i onclick=x>\"'"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder of its own, whose queue no process trains."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    monkeypatch.setattr(run_queue, "ensure_worker", lambda: None)
    return tmp_path


@pytest.fixture
def waiting(data):
    """Three runs that wait; the last one has a hostile name."""
    for name in ("one", "two", "three"):
        folder = write_run(data, name, state="stopped")
        if name == "three":
            text = (folder / "run.toml").read_text()
            (folder / "run.toml").write_text(text.replace('name = "three"', f"name = '''{MARK}'''"))
        run_queue.add(folder)
    return data


def order() -> list[str]:
    return [one.run for one in queue.entries()]


def test_the_queue_is_shown_in_order_and_names_are_text(waiting):
    shown = queue.html(view.read_all())
    places = [shown.index(f'<li class="" data-run="{name}"') for name in ("one", "two", "three")]
    assert "Queue (3)" in shown and places == sorted(places)
    assert "<i" not in shown and "&lt;i onclick=x&gt;&quot;&#x27;" in shown
    first, last = shown[: places[1]], shown[places[2] :]
    assert 'data-do="up" data-run="one"' in first and first.count('aria-disabled="true"') == 1
    assert last.partition('data-do="down"')[2].partition(">")[0].endswith('aria-disabled="true"')


def test_the_buttons_move_and_cancel(waiting):
    assert queue.act("up", "three") == "three: position 2 of 3" and order() == ["one", "three", "two"]
    assert queue.act("down", "one") == "one: position 2 of 3" and order() == ["three", "one", "two"]
    assert "left the queue" in queue.act("cancel", "one") and order() == ["three", "two"]
    for action, run in (("up", "one"), ("up", ""), ("", "two"), ("delete", "two")):
        with pytest.raises(RunError):
            queue.act(action, run)
    assert order() == ["three", "two"]


def test_an_empty_queue_takes_no_room(data):
    write_run(data, "idle", state="stopped")
    assert queue.html(view.read_all()) == ""


@pytest.mark.parametrize(
    ("state", "held", "expected"),
    [
        ("running", True, ["sample", "save", "pause"]),
        ("opening", True, []),
        ("stopping", True, []),
        ("stopped", False, ["queue"]),
        ("completed", False, []),
    ],
)
def test_the_state_of_a_run_decides_its_buttons(data, state, held, expected):
    folder = write_run(data, "cat", state=state)
    lock = Lock(folder / LOCK)
    assert not held or lock.acquire()
    try:
        shown = view.read(folder)
        assert actions.possible(shown) == expected
        assert actions.html(shown).count("data-do=") == len(expected)
    finally:
        lock.release()


def test_a_run_that_waits_can_be_first_or_leave(waiting):
    shown = view.read(waiting / "outputs" / "two")
    assert actions.possible(shown) == ["now", "cancel"]
    assert "Waits in the queue, position 2." in actions.html(shown)
