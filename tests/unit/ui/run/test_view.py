"""The run page shows a run's folder. Hostile text stays text, and a broken file affects only its own part."""

import json
import math
import re
import shutil
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest
from ui_helpers import lora_file, photos, write_incident, write_run

from monitor.process import platform
from monitor.process.platform import LOCK, Lock
from ui import html
from ui.api.runs import run_samples
from ui.run import cards, log_view, run_page, view

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
    """Fails when the markup has a script, an event handler or an unclosed element."""
    found = Tags(markup)
    assert found.open == [], found.open
    assert "script" not in found.tags and "iframe" not in found.tags
    assert not [key for key in found.attributes if key.startswith("on")]
    assert not [url for url in found.attributes.get("href", []) if url.lower().startswith("javascript")]
    assert "x" not in found.attributes.get("src", [])
    return found


def everything(folder) -> str:
    """All parts of one run's page."""
    parts = run_page.render(folder.name, "")
    return "".join(part for part in parts[2:9] if isinstance(part, str))


def test_hostile_text_stays_text(data):
    folder = write_run(data, HOSTILE, message=HOSTILE, reason=HOSTILE, phase=HOSTILE, checkpoint={"step": HOSTILE})
    known = dict.fromkeys(("cause", "changed", "phase", "kind"), HOSTILE)
    write_incident(folder, report=HOSTILE + "\n\n# " + HOSTILE, **known)
    (folder / "training.log").write_text(HOSTILE * 3)
    sample(folder, "x'><script>alert(1)<.png")
    markup = everything(folder)
    harmless(markup)
    assert "alert(2)" in markup  # shown, as text
    [other] = run_samples(folder.name)["others"]
    assert other["url"].count("<") == 0


@pytest.mark.parametrize("state", [*cards.STATES, "a-new-state"])
def test_every_state_has_a_label_and_an_explanation(data, state):
    folder = write_run(data, state=state)
    shown = view.View(folder, "my run", {"state": state, "alive": True, "step": 3, "planned_steps": 9})
    text = cards.head(shown)
    assert "h2" in harmless(text + cards.run_list([shown], folder.name)).tags
    assert cards.describe(shown)[1] in text and "{" not in text


def test_old_figures_of_a_monitor_that_does_not_respond_are_called_old(data):
    now = platform.now()
    known = {"boot": platform.boot_id()[:8], "updated_at": now.utc}
    folder = write_run(data, state="running", updated_mono_s=now.mono_s - 95, **known)
    lock = Lock(folder / LOCK)
    assert lock.acquire()
    shown = view.read(folder)
    assert shown.running
    assert re.search(r"These figures are (9|1\d)\d s old: the monitor does not respond\.", cards.head(shown))
    assert "Monitor does not respond" in cards.head(shown) and "Training" not in cards.run_list([shown], "")
    (folder / "status.json").write_text(json.dumps(shown.status | {"updated_mono_s": now.mono_s}))
    assert view.read(folder).stale == "" and "Training" in cards.run_list([view.read(folder)], "")
    lock.release()


def test_a_run_whose_monitor_is_gone_is_not_shown_as_running(data):
    folder = write_run(data, state="running", checkpoint={"path": "x", "step": 30})
    shown = view.read(folder)
    assert not shown.alive and shown.state == "orphaned"
    assert "Press Resume" in cards.head(shown)
    buttons = run_page._buttons(shown)
    assert not buttons["stop"]["visible"] and not buttons["total"]["visible"]
    assert buttons["go"] == {"visible": True, "value": "Resume"}
    (folder / "status.json").unlink()  # as one that never started
    shown = view.read(folder)
    assert shown.state == "new" and run_page._buttons(shown)["go"] == {"visible": True, "value": "Start"}
    assert everything(folder)
    (folder / "run.toml").write_text("name = [")
    assert "run.toml cannot be read" in cards.head(view.read(folder))
    shown = view.read(write_run(data, "failed", state="failed", checkpoint=None, reason="out of memory"))
    assert shown.start_label == "Start again" and "press Start again to start over" in cards.head(shown)


def lora_cards(folder) -> str:
    return cards.loras(folder, view.loras(folder), view.evolution(folder), None)


def test_a_completed_run_offers_its_lora_and_longer_training(data):
    folder = write_run(data, "done run", state="completed", step=100)
    (folder / "run.toml").write_text('name = "done run"\nepochs = 16\n')
    assert "hp-loras" not in everything(folder)  # without the file there is no download
    lora_file(folder / "done-run.safetensors", 100, values=625_000)
    shown = view.read(folder)
    link = harmless(lora_cards(folder)).attributes
    assert link["download"] == ["done-run.safetensors"] and link["href"][0].startswith("gradio_api/file=/")
    assert "2.5 MB" in lora_cards(folder) and "Final LoRA · step 100" in lora_cards(folder) and shown.progress == 1.0
    buttons = run_page._buttons(shown)
    assert not buttons["stop"]["visible"] and buttons["go"] == {"visible": True, "value": "Train longer"}
    assert buttons["total"] == {"visible": True, "value": 16, "label": "Total epochs"}
    (folder / "run.toml").write_text('name = "done run"\nepochs = 16\nmax_train_steps = 500\n')
    assert run_page._buttons(view.read(folder))["total"] == {"visible": True, "value": 500, "label": "Total steps"}
    (folder / "run.toml").write_text('name = "done run"\n')
    assert not run_page._buttons(view.read(folder))["go"]["visible"]  # the length of the run is unknown


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"state": 7}', '{"state": "running", "step": "x", "eta_s": [], "loss": {}}']
)
def test_a_broken_status_file_affects_only_its_own_run(data, content):
    good, broken = write_run(data, "good"), write_run(data, "broken")
    (broken / "status.json").write_text(content)
    lines = ('{"kind":"step","step":1,"loss":0.5}', "not json", "[]", '{"kind":"step","step":"x"}')
    (broken / "metrics.jsonl").write_text("\n".join(lines))
    (broken / "incidents" / "0001").mkdir(parents=True)
    (broken / "incidents" / "0001" / "incident.json").write_text("{")
    harmless(everything(broken))
    assert "good" in run_page.render(good.name, "")[2]


def test_incidents_show_the_change_and_the_cost_the_latest_first(data):
    folder = write_run(data)
    write_incident(folder, "0010", step=9)
    assert "Cost:" not in cards.incidents(view.incidents(folder))
    fields = {"resumed_from": 30, "steps_repeated": 11, "detect_s": 2.25, "recover_s": 71, "changed": "workers 2 → 0"}
    write_incident(folder, "0002", report="# Hang\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n**bold**", **fields)
    write_incident(folder, "0001", steps_repeated=1, recover_s=2.5, resumed_from=40, from_memory=True)
    found = view.incidents(folder)
    markup = cards.incidents(found)
    shown = ["Hung after step 41", "Loader worker stuck", "workers 2 → 0", ">2.2 s<", "1 min 11 s", "step 30", ">11<"]
    shown += ["step 40, in memory", "Steps trained twice", "<strong>bold</strong>", "<td>1</td>"]
    shown += ["Cost: 1 min 14 s until the next new step, 12 steps trained twice"]
    assert [text for text in shown if text not in markup] == []
    assert [one.number for one in found] == ["0010", "0002", "0001"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"step": 1200, "bytes": 98_000_000, "every": 3, "off": ""}, "step 1,200 (98.0 MB, every 3"),
        ({"step": None, "bytes": 0, "every": 0, "off": "full"}, "Snapshots in memory are off: full."),
    ],
)
def test_the_page_shows_the_snapshots_or_why_there_are_none(data, value, text):
    shown = {"state": "running", "alive": True, "step": 40, "planned_steps": 100, "snapshots": value}
    assert text in cards.head(view.View(data / "outputs" / "r", "r", shown))


def test_a_report_cannot_carry_links_or_pictures():
    text = "[click](javascript:alert(1)) ![p](http://outside/x.png) <http://outside> <b>raw</b>\n\n[a]: http://outside"
    tags = harmless(html.markdown(text))
    assert "a" not in tags.tags and "img" not in tags.tags and "b" not in tags.tags


# Log, samples, times ----------------------------------------------------------------------------------------------


def test_the_log_reads_as_it_looked_on_a_terminal_with_its_colours(data):
    folder = write_run(data)
    bar = b"".join(b"\x1b[32msteps: %3d%%\x1b[0m\r" % n for n in range(0, 101, 10))
    end = b"\n\xff\xfe bytes\x00\x07\n\x1b]0;title\x07\x1b[2Kend\n"
    (folder / "training.log").write_bytes(b"\x1b[1;32mINFO\x1b[0m start\r\n" + bar + end)
    coloured = ("\x1b[1;32mINFO\x1b[0m start", "\x1b[32msteps: 100%\x1b[0m")
    assert [line for _, line in log_view.tail(folder)] == [*coloured, "\ufffd\ufffd bytes", "end"]
    shown = log_view.markup(log_view.tail(folder))
    assert '<span class="hp-sgr-c2">steps: 100%</span>' in shown and "\x1b" not in shown


def sample(folder, name: str):
    (folder / "sample").mkdir(exist_ok=True)
    return shutil.copy(photos("coffee.png")[0], folder / "sample" / name)


def test_every_complete_lora_is_listed_with_its_samples_the_final_one_first(data):
    folder = write_run(data, "r", state="stopped")
    lora_file(folder / "r-step00000100.safetensors", 100, 1)
    lora_file(folder / "r-000004.safetensors", 400, 4)
    lora_file(folder / "r.safetensors", 500, 5)
    lora_file(folder / ".r-step00000200.safetensors.17.tmp.safetensors", 200)
    whole = lora_file(folder / "r-step00000300.safetensors", 300).read_bytes()
    (folder / "r-step00000300.safetensors").write_bytes(whole[:-10])  # being written
    (folder / "notes.safetensors").write_text("I am text")
    sample(folder, "r_000100_00_20260101120000_42.png")
    sample(folder, "r_e000004_00_20260101120000_42.png")
    found = view.loras(folder)
    assert [one.path.name for one in found] == ["r.safetensors", "r-000004.safetensors", "r-step00000100.safetensors"]
    assert [(one.final, one.step, one.epoch) for one in found] == [(True, 500, 5), (False, 400, 4), (False, 100, 1)]
    drawn = harmless(lora_cards(folder)).attributes["alt"]
    assert drawn == ["Sample of prompt 1, epoch 4", "Sample of prompt 1, step 100"]
    (folder / "r-step00000300.safetensors").write_bytes(whole)
    assert len(view.loras(folder)) == 4
    tags = harmless(lora_cards(folder))
    downloads = tags.attributes["download"]  # each LoRA, and all as one ZIP
    assert downloads[0] == "r.safetensors" and len(downloads) == 5


def test_without_metadata_a_file_name_says_the_step_or_epoch(data):
    folder = write_run(data, "r")
    for name in ("r-000004", "r-step00001200", "r"):
        lora_file(folder / f"{name}.safetensors")
    assert [one.at for one in view.loras(folder)] == ["r.safetensors", "step 1,200", "epoch 4"]


# What went wrong --------------------------------------------------------------------------------------------------

OWN = 'Traceback (most recent call last):\n  File "/x/trainer/loop.py", line 1\nRuntimeError: CUDA out of memory\n'
LAUNCHER = (
    "Traceback (most recent call last):\nsubprocess.CalledProcessError: Command '['python']' returned exit status 3.\n"
)


def test_a_usage_error_leads_the_log(data):
    folder = write_run(data, state="failed")
    header = "=== 2026-11-22T00:20:00.000Z attempt 1: train.sh, from the start\n"
    error = "__main__.py: error: argument --optimizer_type: invalid choice: 'prodigy' (choose from adamw, sgd)"
    (folder / "training.log").write_text(header + "usage: …\n" + error + "\n" + OWN + LAUNCHER)
    assert log_view.error_of(folder) == error
    assert html.esc(error) in log_view.first_error(view.read(folder))
    with (folder / "training.log").open("a") as file:
        file.write(header.replace("attempt 1", "attempt 2") + OWN + LAUNCHER)
    assert log_view.error_of(folder) == "RuntimeError: CUDA out of memory"  # of the last attempt, not the launcher's
    (folder / "status.json").write_text('{"state": "stopped", "step": 3}')
    assert error not in log_view.first_error(view.read(folder))


def test_a_log_that_grows_or_begins_again_is_read_again_and_no_other(data):
    folder = write_run(data)
    path = folder / "training.log"
    whole = b"caf\xc3\xa9\n" + b"".join(b"steps: %d%%\r" % n for n in range(5)) + b"\n\x1b[31mred\x1b[0m\nend\n"
    for end in range(len(whole) + 1):
        path.write_bytes(b"") if end == 0 else path.open("ab").write(whole[end - 1 : end])
        last = log_view.tail(folder)
    assert [line for _, line in last] == ["café", "steps: 4%", "\x1b[31mred\x1b[0m", "end"]
    assert log_view.tail(folder) is last
    path.write_text("new\n")
    assert log_view.tail(folder) == [("", "new")]


# Figures -----------------------------------------------------------------------------------------------------------


def labels(folder) -> dict[str, str]:
    shown = view.read(folder)
    shown = view.View(shown.folder, shown.name, {**shown.status, "alive": True}, "", shown.spec)
    return {label: re.sub("<[^>]*>", "", text) for label, text, _ in [*cards.facts(shown, True), *cards.machine(shown)]}


def test_the_figures_of_the_machine_are_shown_where_they_are_known(data):
    gpu = {"name": "RTX", "utilization": 97, "memory_used": 10_000_000_000, "memory_total": 24_000_000_000}
    known = {"elapsed_s": 3725, "cpu_cores": 1.84, "memory_bytes": 3_200_000_000, "disk_free": 51_000_000_000}
    known |= {"step_s": 0.11, "eta_s": 200, "loss": 0.25}
    shown = labels(write_run(data, "all", gpus=[gpu], **known))
    assert shown["GPU"] == "97 %" and shown["GPU memory"] == "10.0 of 24.0 GB" and shown["Elapsed"] == "1 h 2 min"
    assert shown["CPU"].startswith("1.8 of ") and shown["Memory"] == "3.2 GB" and shown["Disk"] == "51.0 GB free"
    assert shown["Time left"] == "3 min 20 s" and shown["Loss"] == "0.25"
    assert shown["Speed"] == "9.1 steps/s" and "Speed" not in labels(write_run(data, "none", step=0, step_s=0.11))
    odd = {"gpus": [7, {"utilization": "x"}], "cpu_cores": None, "disk_free": "x", "elapsed_s": None}
    shown = labels(write_run(data, "odd", **odd, last_progress_at="not a time"))
    assert not {"GPU", "CPU", "Memory", "Disk", "Elapsed", "Last progress"} & set(shown)
    now = datetime.now(UTC)
    for seconds, expected in ((0, "just now"), (75, "1 min [1-4][0-9] s ago")):
        at = (now - timedelta(seconds=seconds)).isoformat()
        assert re.fullmatch(expected, labels(write_run(data, f"{seconds}", last_progress_at=at))["Last progress"])


def test_a_run_without_a_gpu_does_not_wait_for_one(tmp_path):
    without, waiting = (
        view.View(tmp_path, "r", {"state": "queued", "alive": True, "devices": devices}) for devices in ([], ["0"])
    )
    text = cards.head(without) + cards.run_list([without], "")
    assert "GPU" not in text and "Preparing" in text and "when a GPU is free" in cards.head(waiting)


# Search --------------------------------------------------------------------------------------------------------------


def test_the_list_is_searched_by_name_and_state(data):
    for name, state in (("Red cat", "completed"), ("red dog", "failed"), ("blue cat", "completed")):
        write_run(data, name, state=state)
    found = lambda text: {one.name for one in cards.matching(view.read_all(), text)}  # noqa: E731
    assert found("") == {"Red cat", "red dog", "blue cat"} and found("RED") == {"Red cat", "red dog"}
    assert found("red comp") == {"Red cat"} and found("failed") == {"red dog"} and found("nothing") == set()
    assert "No name or state contains" in cards.run_list(view.read_all(), "", "<b>")
    harmless(cards.run_list(view.read_all(), "", "<b>"))


def test_a_long_list_names_the_runs_that_it_leaves_out(data):
    for n in range(cards.LISTED + 7):
        write_run(data, f"run {n}")
    markup = cards.run_list(view.read_all(), "")
    assert markup.count("data-run=") == cards.LISTED and "7 older runs" in markup


# A tick --------------------------------------------------------------------------------------------------------------


def test_a_tick_opens_no_file_that_did_not_change_and_sends_only_what_changed(data, monkeypatch):
    for n in range(30):
        write_run(data, f"run {n}", state="completed")
    folder = write_run(data, "shown", state="stopped")
    write_incident(folder)
    (folder / "metrics.jsonl").write_text("".join(f'{{"kind":"step","step":{s},"loss":1}}\n' for s in range(1, 400)))
    (folder / "training.log").write_text("one\n")
    lora_file(folder / "shown.safetensors", 3)
    sample(folder, "shown_000100_00_20260101120000_42.png")
    first = run_page.render("shown", "")
    opened, real = [], type(folder).read_text
    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "read_text", lambda path, *a, **k: opened.append(path.name) or real(path, *a, **k))
        patch.setattr("safetensors.safe_open", lambda *a, **k: opened.append("lora"))
        again = run_page.refresh("shown", first[1])
    assert all(isinstance(part, dict) and part.get("__type__") == "update" and len(part) == 1 for part in again[2:])
    assert set(opened) <= {"sample_prompts.txt"}  # the samples are a moment old
    (folder / "sample" / "shown_000100_00_20260101120000_42.png").unlink()
    lora_file(folder / "shown-step00000002.safetensors", 2)
    third = run_page.refresh("shown", again[1])
    shown = dict(zip(run_page.PARTS, third[2 : 2 + len(run_page.PARTS)], strict=True))
    assert [name for name, part in shown.items() if not isinstance(part, dict)] == ["loras"]


SPANS = {0: "0 s", 59.4: "59 s", 60: "1 min", 200: "3 min 20 s", 3599: "59 min", 7500: "2 h 5 min", 360000: "4 d 4 h"}


def test_time_spans():
    assert {seconds: html.duration(seconds) for seconds in SPANS} == SPANS
    assert [html.duration(seconds) for seconds in (None, math.nan, -5)] == ["–", "–", "0 s"]


def test_a_run_that_is_selected_comes_with_its_folds_closed_and_a_look_at_it_leaves_them(data):
    """A later answer, or a look that began before the selection, would close what was opened meanwhile."""
    for name in ("one", "two"):
        write_run(data, name)

    def folds(out: list) -> list:
        return [one.get("open") for one in out[-run_page.ALL_FOLDS :]]

    selected = run_page.render("two", "")
    assert folds(selected) == [False] * run_page.ALL_FOLDS
    for seen in (selected[1], run_page.render("one", "")[1], ""):
        assert folds(run_page.refresh("two", seen)) == [None] * run_page.ALL_FOLDS
    assert folds(run_page.refresh("", "")) == [False] * run_page.ALL_FOLDS  # it selects one itself


def test_a_page_opens_with_the_run_in_its_address_or_a_running_one_and_says_what_to_do_without(data, monkeypatch):
    parts = run_page.render("", "")
    assert "No runs yet" in parts[2] and "No run selected" in parts[3]
    gone = run_page.refresh("<gone>", "")  # no other run takes its place, about which a question may still be open
    assert gone[0] == {"__type__": "update"} and "The run &#x27;&lt;gone&gt;&#x27; was renamed or deleted" in gone[3]
    write_run(data, "old", state="completed")
    write_run(data, "busy")
    assert run_page.first_run("old") == "old"
    assert run_page.first_run("no-such-run") == "" and run_page.first_run("") == ""
    assert run_page.refresh("old", "")[0] == {"__type__": "update"}, "a late refresh does not undo a click"
    assert run_page.refresh("", "")[0] in ("old", "busy")
    monkeypatch.setattr("ui.run.view.is_held", lambda path: True)
    assert run_page.first_run("") == "busy"
