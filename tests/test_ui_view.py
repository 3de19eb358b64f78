"""The run page: what a folder says is shown, what is hostile stays text, what is broken costs its own part only."""

import json
import math
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest
from runs_helpers import data  # noqa: F401
from ui_helpers import photos, write_incident, write_run

from ui import cards, html, run_page, view
from ui.chart import chart

HOSTILE = "\"><img src=x onerror=alert(1)><script>alert(2)</script>'${7*7}{{7*7}}`&amp;\x1b[31m\u202e💥"


class Tags(HTMLParser):
    """The elements and attributes of some markup."""

    def __init__(self, markup: str):
        super().__init__()
        self.tags, self.attributes, self.open = [], {}, []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("img", "br", "hr", "line", "path"):
            self.open.append(tag)
        for key, value in attrs:
            self.attributes.setdefault(key, []).append(value)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def harmless(markup: str) -> Tags:
    """Fails when markup has a script, a handler or an element that was not closed."""
    found = Tags(markup)
    assert found.open == [], found.open
    assert "script" not in found.tags and "iframe" not in found.tags
    assert not [key for key in found.attributes if key.startswith("on")]
    assert not [url for url in found.attributes.get("href", []) if url.lower().startswith("javascript")]
    assert "x" not in found.attributes.get("src", [])
    return found


def everything(folder) -> str:
    """All parts of the run page of one run."""
    parts = run_page.render(folder.name, {})
    return "".join(part for part in parts[2:9] if isinstance(part, str))


def test_hostile_text_stays_text_wherever_it_comes_from(data):  # noqa: F811
    folder = write_run(data, HOSTILE, message=HOSTILE, reason=HOSTILE, phase=HOSTILE, checkpoint={"step": HOSTILE})
    write_incident(
        folder, report=HOSTILE + "\n\n# " + HOSTILE, cause=HOSTILE, changed=HOSTILE, phase=HOSTILE, kind=HOSTILE
    )
    (folder / "training.log").write_text(HOSTILE * 3)
    (folder / "sample").mkdir()
    shutil.copy(photos("coffee.png")[0], folder / "sample" / "x'><script>alert(1)<.png")
    markup = everything(folder)
    harmless(markup)
    assert "alert(2)" in markup  # shown, as text


@pytest.mark.parametrize("state", [*cards.STATES, "a-new-state"])
def test_every_state_says_in_words_what_it_is(data, state):  # noqa: F811
    folder = write_run(data, state=state)
    shown = view.View(folder, "my run", {"state": state, "alive": True, "step": 3, "planned_steps": 9})
    tags = harmless(cards.head(shown) + cards.run_list([shown], folder.name))
    assert "h2" in tags.tags
    text = cards.head(shown)
    assert cards.look(state)[1] in text and "{" not in text


def test_the_last_sign_of_life_is_said_in_words(data):  # noqa: F811
    folder = write_run(data)
    for ago, words in ((0.2, "just now"), (75, "1 min 15 s ago"), (None, None)):
        then = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat() if ago is not None else "not a time"
        said = dict((a, b) for a, b, _ in cards.facts(view.View(folder, "r", {"last_progress_at": then}), True))
        assert said.get("Last sign of life") == words


def test_a_run_whose_monitor_is_gone_is_not_called_running(data):  # noqa: F811
    folder = write_run(data, state="running", checkpoint={"path": "x", "step": 30})
    shown = view.read(folder)
    assert not shown.alive and shown.state == "orphaned"
    assert "Press Resume" in cards.head(shown)
    buttons = run_page._buttons(shown)
    assert not buttons["stop"]["visible"] and not buttons["total"]["visible"]
    assert buttons["go"] == {"visible": True, "value": "Resume"}


def test_a_run_without_a_checkpoint_is_not_said_to_go_on(data):  # noqa: F811
    folder = write_run(data, state="failed", checkpoint=None, reason="out of memory")
    shown = view.read(folder)
    assert shown.again == "Start again" and "press Start again to go on from the beginning" in cards.head(shown)


def test_a_run_that_never_started_can_be_started(data):  # noqa: F811
    folder = write_run(data)
    (folder / "status.json").unlink()
    shown = view.read(folder)
    assert shown.state == "new" and run_page._buttons(shown)["go"] == {"visible": True, "value": "Start"}
    assert everything(folder)


def test_a_completed_run_offers_its_lora_and_to_be_trained_longer(data):  # noqa: F811
    folder = write_run(data, "done run", state="completed", step=100)
    (folder / "run.toml").write_text('name = "done run"\nepochs = 16\n')
    assert cards.result(view.read(folder)) == ""  # the file is not there: nothing is promised
    (folder / "done-run.safetensors").write_bytes(b"x" * 2_500_000)
    shown = view.read(folder)
    link = harmless(cards.result(shown)).attributes
    assert link["download"] == ["done-run.safetensors"] and link["href"][0].startswith("gradio_api/file=/")
    assert "2.5 MB" in cards.result(shown) and shown.share == 1.0
    buttons = run_page._buttons(shown)
    assert not buttons["stop"]["visible"] and buttons["go"] == {"visible": True, "value": "Train longer"}
    assert buttons["total"] == {"visible": True, "value": 16, "label": "Epochs in all"}
    (folder / "run.toml").write_text('name = "done run"\nepochs = 16\nmax_train_steps = 500\n')
    assert run_page._buttons(view.read(folder))["total"] == {"visible": True, "value": 500, "label": "Steps in all"}
    (folder / "run.toml").write_text('name = "done run"\n')
    assert not run_page._buttons(view.read(folder))["go"]["visible"]  # nothing says how long it was


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"state": 7}', '{"state": "running", "step": "x", "eta_s": [], "loss": {}}']
)
def test_a_broken_status_file_costs_only_itself(data, content):  # noqa: F811
    good, broken = write_run(data, "good"), write_run(data, "broken")
    (broken / "status.json").write_text(content)
    (broken / "metrics.jsonl").write_text(
        '{"kind":"step","step":1,"loss":0.5}\nnot json\n[]\n{"kind":"step","step":"x"}\n'
    )
    (broken / "incidents" / "0001").mkdir(parents=True)
    (broken / "incidents" / "0001" / "incident.json").write_text("{")
    harmless(everything(broken))
    assert "good" in run_page.render(good.name, {})[2]


def test_a_broken_run_file_is_told(data):  # noqa: F811
    folder = write_run(data, "x")
    (folder / "run.toml").write_text("name = [")
    assert "run.toml cannot be read" in cards.head(view.read(folder))


def test_an_incident_says_what_was_changed_and_what_it_cost(data):  # noqa: F811
    folder = write_run(data)
    fields = {"resumed_from": 30, "steps_repeated": 11, "detect_s": 2.25, "recover_s": 71, "changed": "workers 2 → 0"}
    write_incident(folder, report="# Stuck\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n**bold**", **fields)
    markup = cards.incidents(view.read(folder), view.incidents(folder))
    for words in (
        "Stuck after step 41",
        "Loader worker stuck",
        "workers 2 → 0",
        ">2.2 s<",
        "1 min 11 s",
        "step 30",
        ">11<",
        "<strong>bold</strong>",
        "<td>1</td>",
    ):
        assert words in markup, words


def test_the_latest_incident_comes_first(data):  # noqa: F811
    folder = write_run(data)
    write_incident(folder, "0002", step=7)
    write_incident(folder, "0010", step=9)
    assert [one.number for one in view.incidents(folder)] == ["0010", "0002"]


def test_a_report_cannot_carry_links_or_pictures():
    text = "[click](javascript:alert(1)) ![p](http://outside/x.png) <http://outside> <b>raw</b>\n\n[a]: http://outside"
    tags = harmless(html.markdown(text))
    assert "a" not in tags.tags and "img" not in tags.tags and "b" not in tags.tags


# Loss ------------------------------------------------------------------------------------------------------------


def lines(steps, loss=lambda s: 1 / s) -> str:
    return "".join(json.dumps({"kind": "step", "step": s, "loss": loss(s)}) + "\n" for s in steps)


def test_metrics_are_read_on_from_where_the_last_look_ended(data):  # noqa: F811
    folder = write_run(data)
    path = folder / "metrics.jsonl"
    assert view.losses(folder) == {}
    path.write_text(lines(range(1, 4)) + '{"kind":"gpu"}\n{"kind":"step","st')
    assert list(view.losses(folder)) == [1, 2, 3]
    with path.open("a") as file:
        file.write('ep":4,"loss":0.25}\n' + lines([3, 4], lambda s: 9.0))
    assert view.losses(folder) == {1: 1.0, 2: 0.5, 3: 9.0, 4: 9.0}  # a repeated step: the last line counts
    path.unlink()
    path.write_text(lines([1], lambda s: 5.0))
    os.utime(path)
    assert view.losses(folder) == {1: 5.0}


def test_a_chart_of_any_length_is_small_and_inside_its_frame():
    for steps in (2, 3, 239, 240, 241, 10_000):
        drawn = chart({s: 0.3 + 1 / s for s in range(1, steps + 1)}, steps * 2, [(steps // 2, "restart")])
        assert len(drawn) < 16_000
        root = ElementTree.fromstring(drawn)
        for path in (p for p in root.iter() if p.tag.endswith("path")):
            xs, ys = zip(*(map(float, pair.split()) for pair in re.split("[ML]", path.get("d"))[1:]), strict=True)
            assert min(xs) >= 0 and max(xs) <= 720 and min(ys) >= 0 and max(ys) <= 240
            assert list(xs) == sorted(xs)


@pytest.mark.parametrize(
    "losses",
    [
        {},
        {1: 0.5},
        {1: math.nan, 2: math.nan},
        {1: math.inf, 2: 1.0},
    ],
)
def test_no_chart_without_two_losses(losses):
    assert chart(losses) == ""


@pytest.mark.parametrize(
    "losses",
    [
        {1: 0.5, 2: 0.5},
        {1: 0.0, 2: 0.0},
        {1: -1.0, 2: 1e9, 3: math.nan},
        {10**6: 1e-9, 10**6 + 1: 2e-9},
    ],
)
def test_odd_losses_still_make_a_chart(losses):
    ElementTree.fromstring(chart(losses))
    assert "nan" not in chart(losses)


# Log, samples, words ---------------------------------------------------------------------------------------------


def test_the_log_reads_as_it_looked_on_a_terminal(data):  # noqa: F811
    folder = write_run(data)
    bar = b"".join(b"steps: %3d%%\r" % n for n in range(0, 101, 10))
    (folder / "training.log").write_bytes(b"\x1b[1;32mINFO\x1b[0m start\r\n" + bar + b"\n\xff\xfe bytes\x00\x07\nend\n")
    assert view.log_tail(folder) == "INFO start\nsteps: 100%\n\ufffd\ufffd bytes\nend"


def test_only_the_end_of_a_long_log_is_read(data):  # noqa: F811
    folder = write_run(data)
    (folder / "training.log").write_text("".join(f"line {n}\n" for n in range(100_000)))
    tail = view.log_tail(folder).splitlines()
    assert tail[-1] == "line 99999" and len(tail) == view.LOG_LINES


def test_samples_say_their_step_and_prompt(data):  # noqa: F811
    folder = write_run(data, "r")
    (folder / "sample").mkdir()
    names = ["r_000100_00_20260101120000_42.png", "r_e000002_01_20260101120000_42.png", "other.png"]
    for n, name in enumerate(names):
        path = folder / "sample" / name
        shutil.copy(photos("coffee.png")[0], path)
        os.utime(path, (n, n))
    assert [what for _, what in view.samples(folder)] == ["other", "epoch 2 · prompt 2", "step 100 · prompt 1"]


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (3599, "59 min"),
        (7500, "2 h 5 min"),
        (360000, "4 d 4 h"),
        (None, "–"),
        (math.nan, "–"),
        (-5, "0 s"),
    ],
)
def test_time_spans_in_words(seconds, words):
    assert html.duration(seconds) == words


def test_only_what_changed_is_sent_again(data):  # noqa: F811
    folder = write_run(data)
    (folder / "training.log").write_text("one\n")
    first = run_page.render(folder.name, {})
    again = run_page.render(folder.name, first[1])
    assert all(isinstance(part, dict) and part.get("__type__") == "update" and len(part) == 1 for part in again[2:])
    (folder / "training.log").write_text("one\ntwo\n")
    third = run_page.render(folder.name, again[1])
    assert f"outputs/{folder.name}/training.log" in "".join(part for part in third if isinstance(part, str))
    assert str(folder) not in third[2 + list(run_page.PARTS).index("log")]  # a picture of it shows nobody's home folder
    assert [isinstance(part, str) for part in third[2:9]] == [name == "log" for name in run_page.PARTS]


def test_a_look_that_comes_late_does_not_undo_a_click(data):  # noqa: F811
    write_run(data, "one")
    write_run(data, "two")
    assert run_page.look_again("one", {})[0] == {"__type__": "update"}  # leaves whatever is chosen by now
    assert run_page.look_again("", {})[0] in ("one", "two") and run_page.look_again("gone", {})[0] in ("one", "two")
    assert run_page.render("one", {})[0] == "one"


def test_no_runs_says_what_to_do(data):  # noqa: F811
    parts = run_page.render("", {})
    assert "No runs yet" in parts[2] and "Nothing to show yet" in parts[3]


def test_a_page_opens_with_the_run_of_its_address_or_the_one_going_on(data, monkeypatch):  # noqa: F811
    write_run(data, "old", state="completed")
    write_run(data, "busy")
    assert run_page.first_run("old") == "old"
    assert run_page.first_run("no-such-run") == "" and run_page.first_run("") == ""
    monkeypatch.setattr("monitor.status.is_held", lambda path: True)
    assert run_page.first_run("") == "busy"
