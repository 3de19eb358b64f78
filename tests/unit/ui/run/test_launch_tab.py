"""The lower part of a run: where its time went, the files for other places, and what the ranks do."""

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
def test_each_place_shows_options_of_its_command_and_asks_for_the_required_ones(kind):
    module = importlib.import_module(COMMANDS[kind][0])
    assert len(launch_tab.PLACES[kind].options(kind)) == len(launch_tab.PLACES[kind].labels)
    assert bool(launch_tab.PLACES[kind].needs) == ("--submit" in [row[0] for row in module.OPTIONS])
    required = {words.partition(" ")[0] for words, default, _ in module.OPTIONS if default is ...}
    assert required <= launch_tab.PLACES[kind].labels.keys()


def test_a_typed_value_is_never_another_option():
    assert launch_tab.arguments("slurm", {"--partition": "--submit", "--time": " "}) == ["--partition=--submit"]
    typed = {"--secret": "A  B", "--on-demand": True, "--gpu": "L4"}
    words = ["--gpu=L4", "--secret=A", "--secret=B", "--on-demand"]
    assert launch_tab.arguments("skypilot", typed) == words
    for wrong in ({"--submit": "1"}, {"--time": "a\nb"}, {"--time": "x" * 301}, {"--time": 7}, ["--time"], None):
        with pytest.raises(runs.RunError):
            launch_tab.arguments("slurm", wrong)
    with pytest.raises(runs.RunError, match="Container image: Enter a value"):
        launch_tab.arguments("runpod", {})


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
    found = launch_tab.written(folder, {"script": str(folder / "plan.yaml")})
    assert found is not None and (found["name"], found["text"], found["url"]) == ("plan.yaml", "a: 1\n", "")
    found = launch_tab.written(folder, {"file": str(folder / "big.zip")})
    assert found is not None and (found["name"], found["text"], bool(found["url"])) == ("big.zip", None, True)
    assert served.find(str(folder / "big.zip")) is not None
    for other in (folder / "link.txt", folder / "missing", folder, "..", "/etc/passwd", "plan.yaml", "a\0b", None):
        assert launch_tab.written(folder, {"file": other and str(other)}) is None
    assert launch_tab.written(folder, [1]) is None


def test_the_rank_report_of_a_run_that_does_not_train_is_empty(data, monkeypatch):
    report = lambda folder: {"lines": [f"all ranks of {folder.name} train"]}  # noqa: E731
    monkeypatch.setattr("monitor.cli.commands.rank_report", report)
    folder = make_run(data)
    assert launch_tab._ranks(folder) == ""
    monkeypatch.setattr(launch_tab, "_trains", lambda shown: True)
    assert "all ranks of my-cat train" in launch_tab._ranks(folder)
