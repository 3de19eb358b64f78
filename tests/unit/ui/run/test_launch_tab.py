"""The lower part of a run: where its time went, the files for other places, and what the ranks do."""

import importlib

import pytest
from draft_helpers import drawn
from runs_helpers import executable, pictures
from ui_helpers import watched

import runs
from launch import rehearse
from launch.__main__ import COMMANDS
from ui import jobs, served
from ui.new import rehearsal
from ui.run import launch_tab


@pytest.mark.parametrize("kind", launch_tab.PLACES)
def test_each_place_shows_options_of_its_command_and_asks_for_the_required_ones(kind):
    module = importlib.import_module(COMMANDS[kind][0])
    assert len(launch_tab.options(kind)) == len(launch_tab.PLACES[kind].labels)
    assert bool(launch_tab.PLACES[kind].needs) == ("--submit" in [row[0] for row in module.OPTIONS])
    required = {words.partition(" ")[0] for words, default, _ in module.OPTIONS if default is ...}
    assert required <= launch_tab.PLACES[kind].labels.keys()


def test_skypilot_is_found_where_its_command_finds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SKYPILOT_VENV", str(tmp_path / "venv"))
    assert "set SKYPILOT_VENV" in launch_tab.missing(launch_tab.PLACES["skypilot"])
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    executable(tmp_path / "venv" / "bin" / "sky", "#!/bin/sh\n")
    assert launch_tab.missing(launch_tab.PLACES["vast"]) == ""


def test_a_typed_value_is_never_another_option():
    def words(kind: str, **typed) -> list[str]:
        return launch_tab.arguments(kind, [typed.get(label) for label in launch_tab.PLACES[kind].labels.values()])

    assert words("slurm", Partition="--submit", Account=" ") == ["--partition=--submit"]
    typed = {"Names of secret variables": "A  B", "No spot machines": True, "GPU": "L4"}
    assert words("skypilot", **typed) == ["--gpu=L4", "--secret=A", "--secret=B", "--on-demand"]
    for wrong in ("a\nb", "x" * 301, "a\0b"):
        with pytest.raises(runs.RunError, match="Account: Use one line"):
            words("slurm", Account=wrong)
    with pytest.raises(runs.RunError, match="Container image: Enter a value"):
        words("runpod")


def test_what_a_job_says_is_text(folder, monkeypatch):
    assert launch_tab.result(folder, "launch-slurm") == ""
    mark = "<i onclick=x>"
    (folder / "plan.yaml").write_text(mark)
    monkeypatch.setattr("ui.jobs.read", lambda folder, name: jobs.Job(name, "failed", 3.0))
    monkeypatch.setattr("ui.jobs.output", lambda folder, name: (mark, {"file": str(folder / "plan.yaml")}, mark))
    shown = launch_tab.result(folder, "launch-slurm")
    assert "<i" not in shown and shown.count("&lt;i onclick=x&gt;") == 3


def test_only_files_of_the_run_are_shown(folder, tmp_path):
    (folder / "plan.yaml").write_text("a: 1\n")
    (folder / "big.zip").write_bytes(b"\0" * 300_000)
    (folder / "data.bin").write_bytes(b"\0")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    shown = launch_tab.written(folder, {"script": str(folder / "plan.yaml")})
    link = 'href="data:text/plain;charset=utf-8,a%3A%201%0A" download="plan.yaml"'
    assert "<pre>a: 1\n</pre>" in shown and link in shown
    shown = launch_tab.written(folder, {"file": str(folder / "big.zip")})
    assert 'href="gradio_api/file=' in shown and "<pre>" not in shown
    assert served.find(str(folder / "big.zip"))[1] == "application/zip"
    others = [str(folder / other) for other in ("link.txt", "missing", ".", "data.bin")]
    for other in (*others, "/etc/passwd", "..", "plan.yaml", "a\0b", None):
        assert launch_tab.written(folder, {"file": other}) == ""
    assert launch_tab.written(folder, [1]) == ""


def test_a_rehearsal_that_cannot_begin_does_not_show_the_result_of_the_one_before(data, tmp_path, monkeypatch):
    run = runs.create(runs.make({"name": "cat", "model": "tiny-flux", "trigger": "x"}), pictures(tmp_path / "in"))
    (run / rehearse.FILE).write_text('{"state": "passed", "stages": [], "took_s": 60}')
    events, _ = drawn(launch_tab.draw, run)
    assert "The rehearsal passed in 1 min" in rehearsal.shown(run, lambda: None, dict)[1]
    monkeypatch.setattr(jobs, "start", lambda *given: given[-1]())
    events["begin"]()
    monkeypatch.setattr(jobs, "read", lambda folder, name: jobs.Job(name, "failed", 3.0))
    monkeypatch.setattr(jobs, "reason", lambda folder, name: "GPU 0 is in use")
    shown = rehearsal.shown(run, lambda: None, dict)[1]
    assert "could not be tried" in shown and "GPU 0 is in use" in shown


def test_the_rank_report_of_a_run_that_does_not_train_is_empty(folder, monkeypatch):
    report = lambda folder: [f"all ranks of {folder.name} train"]  # noqa: E731
    monkeypatch.setattr("monitor.cli.commands.rank_report", report)
    assert launch_tab._ranks(folder) == ""
    with watched(folder):
        assert "all ranks of my-run train" in launch_tab._ranks(folder)
