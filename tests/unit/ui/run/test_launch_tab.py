"""The lower part of a run: where its time went, the files for other places, and what the ranks do."""

import argparse
import importlib

import pytest
from ledger_helpers import write_history
from ui_helpers import photos, write_run

import runs
from launch.__main__ import COMMANDS
from ui import jobs, served
from ui.run import cards, launch_tab, view


def make_run(data, name: str = "my cat", **fields):
    """A run as `runs.create` writes it, on the tiny model."""
    values = {"name": name, "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 4, "trigger": "cat"}
    return runs.create(runs.make({**values, **fields}), photos("chelsea.png", "coffee.png"))


def test_the_card_shows_time_by_state_cost_and_what_recovery_saved(data):
    folder = write_run(data, "paid", state="completed")
    write_history(folder, price=3.6)
    shown = view.read(folder)
    html = cards.ledger(shown, view.ledger(shown))
    for text in ("Time and money", "Recovering", "Lost", "10 steps", "1.10", "1 of 1 failure recovered", "not counted"):
        assert text in html, text
    free = write_run(data, "free", state="completed")
    write_history(free)
    shown = view.read(free)
    html = cards.ledger(shown, view.ledger(shown))
    assert "Cost" not in html and "money" not in html
    assert cards.ledger(None, None) == ""


def test_the_card_reads_again_only_what_changed(data, monkeypatch):
    folder = write_run(data, "paid", state="completed")
    write_history(folder)
    first = view.ledger(view.read(folder))
    assert view.ledger(view.read(folder)) is first
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"t": "2026-11-22T11:00:00Z", "kind": "started", "attempt": 3, "step": 100}\n')
    assert view.ledger(view.read(folder)) is not first


@pytest.mark.parametrize(
    "store, text",
    [
        ({"step": 1200, "pending_bytes": 0}, "Store s3://b/r: the checkpoint of step 1,200 is there."),
        ({"step": 20, "pending_bytes": 2_500_000}, "step 20 is there; 2.5 MB still to copy."),
        ({"step": None, "error": "no answer"}, "no checkpoint is there yet. no answer. Training goes on"),
        (
            {"lease": "lost", "state": "other (process 7) took the lease"},
            "Store s3://b/r: other (process 7) took the lease.",
        ),
        (None, ""),
        ({"address": "<b>", "step": "x"}, "Store <b>: no checkpoint is there yet."),
    ],
)
def test_the_state_of_the_store_is_a_sentence(data, store, text):
    store = store and {"address": "s3://b/r", "lease": "held", **store}
    folder = write_run(data, "far", state="completed", store=store)
    shown = view.read(folder)
    assert text in cards.store(shown) and (text or cards.store(shown) == "")
    assert "<b>" not in cards.head(shown)


@pytest.mark.parametrize("kind", launch_tab.PLACES)
def test_each_place_is_a_command_that_has_its_options(kind):
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[kind][0]).add_arguments(parser)
    known = {text: action for action in parser._actions for text in action.option_strings}
    place = launch_tab.PLACES[kind]
    assert bool(place.needs) == ("--submit" in known)
    for option in place.options:
        assert option.flag in known, f"{kind} has no {option.flag}"
        assert (known[option.flag].nargs == 0) == (option.kind == "switch")
        assert isinstance(known[option.flag], argparse._AppendAction) == (option.kind == "words")
    required = {text for text, action in known.items() if action.required}
    assert required == {option.flag for option in place.options if option.required}


def test_a_typed_value_is_never_another_option():
    place = launch_tab.PLACES["slurm"]
    assert launch_tab.arguments(place, {"--partition": "--submit", "--time": " "}) == ["--partition=--submit"]
    typed = {"--secret": "A  B", "--on-demand": True, "--gpu": "L4"}
    assert launch_tab.arguments(launch_tab.PLACES["skypilot"], typed) == [
        "--gpu=L4",
        "--secret=A",
        "--secret=B",
        "--on-demand",
    ]
    for wrong in ({"--submit": "1"}, {"--time": "a\nb"}, {"--time": "x" * 301}, {"--time": 7}, ["--time"], None):
        with pytest.raises(runs.RunError):
            launch_tab.arguments(place, wrong)


def test_jobs_that_are_none_of_ours_start_and_end_nothing(data):
    folder = make_run(data)
    for call in (lambda: launch_tab.write_files(folder, "rm", {}), lambda: launch_tab.cancel(folder, "../rehearse")):
        with pytest.raises(runs.RunError):
            call()
    assert not list((data / "outputs").glob("*/.jobs/*")) and launch_tab.result(folder, "rehearse") == ""


def test_what_a_job_says_is_text(data, monkeypatch):
    folder = make_run(data)
    mark = "<i onclick=x>"
    (folder / "plan.yaml").write_text(mark)
    monkeypatch.setattr("ui.jobs.read", lambda folder, name: jobs.Job(name, "failed", 3.0))
    values = {"launch-slurm": {"file": str(folder / "plan.yaml")}}
    values |= {"rehearse": {"state": "failed", "problem": {"text": mark}}}
    monkeypatch.setattr("ui.jobs.output", lambda folder, name: (mark, values[name], mark))
    for name in values:
        shown = launch_tab.result(folder, name)
        assert "<i" not in shown and shown.count("&lt;i onclick=x&gt;") == 3


def test_only_files_of_the_run_are_shown(data, tmp_path):
    folder = make_run(data)
    (folder / "plan.yaml").write_text("a: 1\n")
    (folder / "big.zip").write_bytes(b"\0" * 300_000)
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    paths = [str(folder / name) for name in ("plan.yaml", "big.zip", "link.txt", "missing", "..")]
    said = {"file": paths[0], "all": [*paths, "/etc/passwd", "plan.yaml", "a\0b"], "n": {"a": [1, None]}}
    found = [(one["name"], one["text"], bool(one["url"])) for one in launch_tab.written(folder, said)]
    assert found == [("plan.yaml", "a: 1\n", False), ("big.zip", None, True)]
    assert served.find(str(folder / "big.zip")) is not None


def test_the_rank_report_of_a_run_that_does_not_train_is_empty(data, monkeypatch):
    folder = make_run(data)
    assert launch_tab.rank_lines(folder) == [] and launch_tab._ranks(folder) == ""
    report = lambda folder: {"lines": [f"all ranks of {folder.name} train"]}  # noqa: E731
    monkeypatch.setattr("monitor.cli.commands.rank_report", report)
    assert launch_tab.rank_lines(folder) == ["all ranks of my-cat train"]
