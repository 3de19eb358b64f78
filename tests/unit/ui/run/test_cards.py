"""The cards of a run: states, figures, incidents and the list of runs, as markup."""

import errno
import json
import os
import re
from datetime import UTC, datetime, timedelta
from unittest import mock

import pytest
from ui_helpers import watched, write_history, write_incident, write_run
from ui_markup import harmless

from monitor.process import platform
from monitor.run_folder import all_folders
from runs.files import RunError
from runs.paths import START
from ui.api.runs import list_runs
from ui.run import cards, view


@pytest.mark.parametrize("state", [*cards.STATES, "a-new-state"])
def test_every_state_has_a_label_and_an_explanation(data, state):
    folder = write_run(data, state=state)
    shown = view.View(folder, "my run", {"state": state, "alive": True, "step": 3, "planned_steps": 9})
    text = cards.head(shown)
    assert "h2" in harmless(text + cards.run_list([shown], folder.name)).tags
    assert cards.describe(shown)[1] in text and "{" not in text
    (folder / "train.sbatch").touch()
    assert ("job of Slurm" in cards.head(shown)) == (state == "preempted") and "Slurm" not in text
    shown.status["message"] = "write it with `python -m runs render <b>`"
    assert f"<code>{START} render &lt;b&gt;</code>" in cards.head(shown) or state == "orphaned"


def test_old_figures_of_a_monitor_that_does_not_respond_are_called_old(data):
    now = platform.now()
    known = {"boot": platform.boot_id()[:8], "updated_at": now.utc}
    folder = write_run(data, state="running", updated_mono_s=now.mono_s - 95, **known)
    with watched(folder):
        shown = view.read(folder)
        assert shown.running
        assert re.search(r"These figures are (9|1\d)\d s old: the monitor does not respond\.", cards.head(shown))
        assert "Monitor does not respond" in cards.head(shown) and "Training" not in cards.run_list([shown], "")
        (folder / "status.json").write_text(json.dumps(shown.status | {"updated_mono_s": now.mono_s}))
        assert view.read(folder).stale == "" and "Training" in cards.run_list([view.read(folder)], "")


def test_incidents_show_the_change_and_the_cost_the_latest_first(folder):
    write_incident(folder, "0010", step=9, explanation="Why.", diagnosis={"advice": "What to do."})
    assert "Cost:" not in cards.incidents(folder, view.incidents(folder))
    fields = {"resumed_from": 30, "steps_repeated": 11, "detect_s": 2.25, "recover_s": 71, "changed": "workers 2 → 0"}
    write_incident(folder, "0002", report="# Hang\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n**bold**", **fields)
    write_incident(folder, "0001", steps_repeated=1, recover_s=2.5, resumed_from=40, from_memory=True)
    found = view.incidents(folder)
    markup = cards.incidents(folder, found)
    shown = ["Hung after step 41", "Loader worker stuck", "workers 2 → 0", ">2.2 s<", "1 min 11 s", "step 30", ">11<"]
    shown += ["step 40, in memory", "Steps trained twice", "<strong>bold</strong>", "<td>1</td>"]
    shown += ["Cost: 1 min 14 s without a new step, 12 steps trained twice", "Why. What to do."]
    assert [text for text in shown if text not in markup] == []
    assert [one.number for one in found] == ["0010", "0002", "0001"]
    assert cards.incidents(folder, view.incidents(folder)) is markup  # the page asks every second: made once


def test_reports_are_rendered_once_however_many_there_are(folder, monkeypatch):
    for number in range(200):
        write_incident(folder, f"{number:04d}", report=f"# Hang {number}")
    rendered = []
    monkeypatch.setattr(cards, "markdown", lambda text: rendered.append(text) or text)
    first = cards.incidents(folder, view.incidents(folder))
    assert len(rendered) == 200 and cards.incidents(folder, view.incidents(folder)) == first
    write_incident(folder, "0200", report="# The newest")
    assert "older" not in first
    now = cards.incidents(folder, view.incidents(folder))
    assert "The newest" in now and len(rendered) == 201
    assert now.count("<article") == 200 and f"1 older: in {folder}/incidents" in now, "450 of them are 0.8 MB"


def test_of_very_many_incidents_the_newest_are_shown(folder, monkeypatch):
    monkeypatch.setattr(cards, "NEWEST", 1)
    for number in range(2):
        write_incident(folder, f"{number:04d}", report=f"# Hang {number}")
    shown = cards.incidents(folder, view.incidents(folder))
    assert "Hang 1" in shown and shown.count("<article") == 1 and f"1 older: in {folder}/incidents" in shown


def test_the_page_shows_the_snapshots_or_why_there_are_none(data):
    for value, text in (
        ({"step": 1200, "bytes": 98_000_000, "every": 3, "off": ""}, "copied to memory every 3 steps (98.0 MB)."),
        ({"step": None, "bytes": 0, "every": 0, "off": "full"}, "Steps are not copied to memory: full."),
    ):
        shown = {"state": "running", "alive": True, "step": 40, "planned_steps": 100, "snapshots": value}
        assert text in cards.head(view.View(data / "outputs" / "r", "r", shown))


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
    queued = {"state": "queued", "alive": True}
    without, waiting = (view.View(tmp_path, "r", {**queued, "devices": devices}) for devices in ([], ["0"]))
    text = cards.head(without) + cards.run_list([without], "")
    assert "GPU" not in text and "Preparing" in text and "when a GPU is free" in cards.head(waiting)
    stopped = view.View(tmp_path, "r", {"state": "stopped", "message": "stopped at step 4"})
    assert "Stopped at step 4" in cards.head(stopped), "a sentence"


def test_runs_on_a_network_drive_that_is_gone_are_not_called_deleted(data, monkeypatch):
    stale = mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle", "/nas/outputs"))
    monkeypatch.setattr(os, "listdir", stale)
    why = "cannot show the runs (/nas/outputs): the disk or network drive cannot be read or written"
    with pytest.raises(RunError, match=re.escape(why)):
        view.folder_of("cat")
    for answer in (list_runs, all_folders):
        with pytest.raises((RunError, OSError), match="Stale|cannot be read"):
            answer()
    for markup in (cards.run_list(view.read_all(), ""), cards.no_run("cat")):
        assert "cannot be shown" in markup and why in markup


def test_the_list_is_searched_by_name_and_state_and_names_how_many_it_leaves_out(data):
    for name, state in (("Red cat", "completed"), ("red dog", "failed"), ("blue cat", "completed")):
        write_run(data, name, state=state)
    found = lambda text: {one.name for one in cards.matching(view.read_all(), text)}  # noqa: E731
    assert found("RED") == {"Red cat", "red dog"} and found("red comp") == {"Red cat"}
    assert "No name or state contains" in cards.run_list(view.read_all(), "", "<b>")
    harmless(cards.run_list(view.read_all(), "", "<b>"))
    for n in range(cards.LISTED + 4):
        write_run(data, f"run {n}")
    markup = cards.run_list(view.read_all(), "")
    assert markup.count("data-run=") == cards.LISTED and "7 older runs" in markup


def test_the_card_shows_time_by_state_cost_and_what_recovery_saved(data):
    def card(name: str, price: float) -> str:
        folder = write_run(data, name, state="completed")
        write_history(folder, price)
        return cards.ledger(view.read(folder))

    shown, free = card("paid", 3.6), card("free", 0)
    parts = ("Time and money", "Recovering", "Lost", "10 steps", "1.10", "1 of 1 failure recovered", "not counted")
    assert [text for text in parts if text not in shown] == []
    assert "Recovering" in free and "Cost" not in free and "money" not in free


def test_the_state_of_the_store_is_a_sentence(data):
    for store, text in (
        ({"step": 1200, "pending_bytes": 0}, "Store s3://b/r: the checkpoint of step 1,200 is there."),
        ({"step": 20, "pending_bytes": 2_500_000}, "step 20 is there; 2.5 MB still to copy."),
        ({"step": None, "error": "no answer"}, "no checkpoint is there yet. no answer. Training goes on"),
        ({"lease": "lost", "state": "other took the lease"}, "Store s3://b/r: other took the lease."),
        (None, ""),
        ({"address": "<b>", "step": "x"}, "Store <b>: no checkpoint is there yet."),
    ):
        store = store and {"address": "s3://b/r", "lease": "held", **store}
        shown = view.View(data / "outputs" / "far", "far", {"state": "completed", "store": store})
        assert text in cards.store(shown) and (text or cards.store(shown) == "")
        assert "<b>" not in cards.head(shown)
