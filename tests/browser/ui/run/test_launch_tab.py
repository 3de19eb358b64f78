"""The lower part of a run: where its time went, the files for other places, the probe, and what the ranks do."""

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys

import psutil
import pytest
from ui_helpers import kill_runs, photos, serving, write_run
from ui_page import a_tab, faint_texts, nameless_controls, open_page, until

import runs
from launch.__main__ import COMMANDS
from ui import jobs, served
from ui.run import cards, launch_tab, view

MINUTE = {"kind": "phase", "message": ""}


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    return tmp_path


def make_run(data, name: str = "my cat", **fields):
    """A run as `runs.create` writes it, on the tiny model."""
    values = {"name": name, "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 4, "trigger": "cat"}
    return runs.create(runs.make({**values, **fields}), photos("chelsea.png", "coffee.png"))


def write_history(folder, price: float = 0.0) -> None:
    """Events of a run that hung once."""
    at = lambda s: {"t": f"2026-11-22T10:{s // 60:02}:{s % 60:02}.000Z", "mono_s": float(s), "boot": "b"}  # noqa: E731
    rows = [
        {**at(0), "kind": "started", "attempt": 1, "step": 0, "metrics_bytes": 0},
        {**at(60), "kind": "phase", "phase": "step", "step": 1},
        {**at(360), "kind": "hang", "step": 40, "since_s": 60.0},
        {**at(370), "kind": "restarted", "attempt": 2, "step": 30, "metrics_bytes": 0},
        {**at(400), "kind": "phase", "phase": "step", "step": 31},
        {**at(1100), "kind": "checkpoint", "step": 100},
        {**at(1100), "kind": "completed", "message": "done"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(f'name = "{folder.name}"\nprice_per_hour = {price}\n')


# The ledger's card --------------------------------------------------------------------------------------------------------


def test_the_card_shows_time_by_state_cost_and_what_recovery_saved(data):
    folder = write_run(data, "paid", state="completed")
    write_history(folder, price=3.6)
    shown = view.read(folder)
    html = cards.ledger(shown, view.ledger(shown))
    for text in (
        "Time and money",
        "Training",
        "Recovering",
        "Lost",
        "10 steps",
        "1.10",
        "1 of 1 failure recovered",
        "not counted",
    ):
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
        ({"address": "s3://b/r", "lease": "held", "step": 1200, "pending_bytes": 0}, "Store s3://b/r: the checkpoint of step 1,200 is there."),
        ({"address": "s3://b/r", "lease": "held", "step": 20, "pending_bytes": 2_500_000}, "step 20 is there; 2.5 MB still to copy."),
        ({"address": "s3://b/r", "lease": "held", "step": None, "error": "no answer"}, "no checkpoint is there yet. no answer. Training goes on"),
        ({"address": "s3://b/r", "lease": "lost", "state": "other (process 7) took the lease"}, "Store s3://b/r: other (process 7) took the lease."),
        (None, ""),
        ({"address": "<b>", "lease": "held", "step": "x"}, "Store <b>: no checkpoint is there yet."),
    ],
)  # fmt: skip
def test_the_state_of_the_store_is_a_sentence(data, store, text):
    folder = write_run(data, "far", state="completed", store=store)
    shown = view.read(folder)
    assert text in cards.store(shown) and (text or cards.store(shown) == "")
    assert "<b>" not in cards.head(shown)


# The commands -------------------------------------------------------------------------------------------------------------


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
    words = launch_tab.arguments(
        launch_tab.PLACES["skypilot"], {"--secret": "A  B", "--on-demand": True, "--gpu": "L4"}
    )
    assert words == ["--gpu=L4", "--secret=A", "--secret=B", "--on-demand"]
    for wrong in ({"--submit": "1"}, {"--time": "a\nb"}, {"--time": "x" * 301}, {"--time": 7}, ["--time"], None):
        with pytest.raises(runs.RunError):
            launch_tab.arguments(place, wrong)


@pytest.mark.parametrize(
    "data_sent",
    [None, {}, {"run": 1}, {"run": "../outputs"}, {"run": "/etc"}, {"run": "gone"}, {"run": ""}, {"run": "my-cat", "kind": "rm"}],
)  # fmt: skip
def test_calls_for_no_run_of_ours_start_nothing(data, data_sent):
    make_run(data)
    for call in (launch_tab.write_files, launch_tab.cancel_job, launch_tab.job_output):
        assert call(data_sent)["ok"] is False
    for call in (launch_tab.open_places, launch_tab.probe_start, launch_tab.diagnose):
        if not isinstance(data_sent, dict) or data_sent.get("run") != "my-cat":
            assert call(data_sent)["ok"] is False
    assert not list((data / "outputs").glob("*/.jobs/*"))


def test_only_files_of_the_run_are_shown(data, tmp_path):
    folder = make_run(data)
    (folder / "plan.yaml").write_text("a: 1\n")
    (folder / "big.tar").write_bytes(b"\0" * 300_000)
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    paths = [str(folder / name) for name in ("plan.yaml", "big.tar", "link.txt", "missing", "..")]
    found = launch_tab.written(
        folder, {"file": paths[0], "all": [*paths, "/etc/passwd", "plan.yaml", "a\0b"], "n": {"a": [1, None]}}
    )
    assert [(one["name"], one["text"], bool(one["url"])) for one in found] == [
        ("plan.yaml", "a: 1\n", False),
        ("big.tar", None, True),
    ]
    assert served.find(str(folder / "big.tar")) is not None


def test_the_rank_report_of_a_run_that_does_not_train_is_empty(data, monkeypatch):
    make_run(data)
    assert launch_tab.rank_lines({"run": "my-cat"}) == {"ok": True, "lines": []}
    monkeypatch.setattr(
        "monitor.cli.commands.rank_report", lambda folder: {"lines": [f"all ranks of {folder.name} train"]}
    )
    assert launch_tab.rank_lines({"run": "my-cat"})["lines"] == ["all ranks of my-cat train"]


# Jobs ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A module `job_program` that a job can run: it prints, waits until a file is there, and exits."""
    (tmp_path / "job_program.py").write_text(
        "import os, sys, time, json\nprint('working', flush=True)\n"
        "print('to people', file=sys.stderr)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.02)\n"
        "print(json.dumps({'pid': os.getpid()}))\nsys.exit(int(sys.argv[2]))\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path / "go"


@pytest.mark.parametrize("code, state", [(0, "done"), (3, "failed")])
def test_a_job_is_read_while_it_runs_and_after_it(data, program, code, state):
    folder = write_run(data, "one")
    jobs.start(folder, "probe", ["job_program", str(program), str(code)], 60)
    assert jobs.read(folder, "probe").state == "running"
    until(lambda: "working" in jobs.output(folder, "probe")[0], "its first line is there")
    with pytest.raises(runs.RunError, match="running already"):
        jobs.start(folder, "probe", ["job_program", str(program), "0"], 60)
    stamp = jobs.read(folder, "probe").stamp
    program.touch()
    until(lambda: jobs.read(folder, "probe").state == state, f"the job is {state}")
    text, value, errors = jobs.output(folder, "probe")
    assert text.strip() == "working" and value["pid"] > 0 and errors.strip() == "to people"
    assert jobs.read(folder, "probe").stamp != stamp
    assert list(jobs.all_of(folder)) == ["probe"] and jobs.read(folder, "other") is None


def test_a_job_outlives_the_process_that_started_it(data, program):
    folder = write_run(data, "one")
    code = "import sys; from pathlib import Path; from ui import jobs; jobs.start(Path(sys.argv[1]), 'probe', ['job_program', sys.argv[2], '0'], 60)"
    subprocess.run([sys.executable, "-c", code, str(folder), str(program)], check=True, timeout=100, cwd=runs.ROOT)
    assert jobs.read(folder, "probe").state == "running"
    program.touch()
    until(lambda: jobs.read(folder, "probe").state == "done", "the job completes")


def test_a_job_is_cancelled_ended_after_its_limit_and_lost_when_killed(data, program):
    folder = write_run(data, "one")
    jobs.start(folder, "probe", ["job_program", str(program), "0"], 60)
    jobs.cancel(folder, "probe")
    until(lambda: jobs.read(folder, "probe").state == "cancelled", "the job is cancelled")
    jobs.start(folder, "probe", ["job_program", str(program), "0"], 0.5)
    until(lambda: jobs.read(folder, "probe").state == "failed", "the job is ended")
    assert "took longer than" in jobs.output(folder, "probe")[2]
    jobs.start(folder, "probe", ["job_program", str(program), "0"], 60)
    until(lambda: "working" in jobs.output(folder, "probe")[0], "it runs")
    process = psutil.Process(json.loads((folder / ".jobs/probe.json").read_text())["pid"])
    for one in [process, *process.children()]:
        one.kill()
    until(lambda: jobs.read(folder, "probe").state == "lost", "its end was not seen")
    assert launch_tab.value(view.read(folder))["jobs"]["probe"]["state"] == "lost"


# In a browser -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    data = tmp_path_factory.mktemp("launch") / "data"
    data.mkdir()
    before = os.environ.get("HANGPROOF_DATA")
    os.environ["HANGPROOF_DATA"] = str(data)
    try:
        make_run(data, "my cat")
        write_history(write_run(data, "old", state="completed"), 3.6)
        with serving(data, PATH=str(tmp_path_factory.mktemp("no-programs"))) as running:
            yield running
    finally:
        os.environ.pop("HANGPROOF_DATA") if before is None else os.environ.__setitem__("HANGPROOF_DATA", before)


def open_run(page, server, name: str):
    open_page(page, server)
    page.get_by_role("tab", name="Runs").click()
    page.locator(f".hp-run[data-run={name}]").click()
    page.locator(f"[data-testid=run-name][data-run={name}]").wait_for()
    fold = page.get_by_test_id("fold-elsewhere")
    fold.locator("summary").click()
    fold.locator(".hp-place-choice").first.wait_for()
    return fold


def test_the_files_are_written_shown_and_downloaded(browser, server):
    with a_tab(browser) as page:
        fold = open_run(page, server, "my-cat")
        assert fold.locator(".hp-place-choice").count() == len(launch_tab.PLACES)
        fold.get_by_label("Slurm cluster").check()
        fold.get_by_label("Partition").fill("night")
        assert fold.get_by_test_id("ask-submit").is_disabled() and "sbatch is not installed" in fold.inner_text()
        fold.get_by_test_id("write-files").click()
        script = fold.locator(".hp-file", has_text="train.sbatch")
        script.wait_for()
        assert "#SBATCH --partition=night" in script.locator("pre").inner_text()
        with page.expect_download() as download:
            script.get_by_role("link", name="Download").click()
        assert download.value.suggested_filename == "train.sbatch"
        assert "#SBATCH" in download.value.path().read_text()
        page.reload()
        fold = open_run(page, server, "my-cat")
        fold.locator(".hp-file", has_text="train.sbatch").wait_for()


def test_a_command_that_refuses_says_why(browser, server):
    with a_tab(browser) as page:
        fold = open_run(page, server, "my-cat")
        fold.get_by_label("RunPod").check()
        assert "no store" in fold.inner_text() and "RUNPOD_API_KEY" in fold.inner_text()
        fold.get_by_test_id("write-files").click()
        fold.get_by_text("Container image: Enter a value").wait_for()
        fold.get_by_label("Container image").fill("me/hangproof:1")
        until(fold.get_by_test_id("write-files").is_enabled, "the button can be pressed again")
        fold.get_by_test_id("write-files").click()
        alert = fold.locator(".hp-job [role=alert]")
        alert.wait_for()
        assert "trains on a CPU" in alert.inner_text()
        assert fold.locator(".hp-job-state").inner_text() == "Failed"


def test_the_bundle_is_a_download(browser, server):
    with a_tab(browser) as page:
        fold = open_run(page, server, "my-cat")
        fold.get_by_label("One file").check()
        fold.get_by_test_id("write-files").click()
        link = fold.locator(".hp-file", has_text="my-cat.tar").get_by_role("link")
        link.wait_for()
        with page.expect_download() as download:
            link.click()
        assert download.value.path().stat().st_size > 100_000


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_it_can_be_read_and_used_by_everyone(browser, server, width, scheme):
    from axe_playwright_python.sync_playwright import Axe

    with a_tab(browser, width=width, color_scheme=scheme) as page:
        fold = open_run(page, server, "old")
        assert page.locator("#run-ledger").get_by_text("Time and money").is_visible()
        assert faint_texts(page) == [] and nameless_controls(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        found = Axe().run(page, context="#run-elsewhere").response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        fold.get_by_label("Slurm cluster").focus()
        page.keyboard.press("ArrowRight")
        assert fold.get_by_label("SkyPilot").is_checked()
        fold.get_by_label("No spot machines").wait_for()


@contextlib.contextmanager
def probing(browser, tmp_path):
    """(page, fold, folder) of a run whose probe was started with the button; the page was reloaded since."""
    data = tmp_path / "data"
    data.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANGPROOF_DATA", str(data))
        folder = make_run(data, "my cat")
    try:
        with serving(data) as server, a_tab(browser) as page:
            open_page(page, server)
            page.get_by_role("tab", name="Runs").click()
            fold = page.get_by_test_id("fold-probe")
            fold.locator("summary").click()
            fold.get_by_test_id("probe").click()
            fold.get_by_text("Running for").wait_for()
            page.reload()
            page.locator("body.hp-open").wait_for()
            page.get_by_role("tab", name="Runs").click()
            fold.get_by_role("button", name="Cancel").wait_for()  # it is opened by itself
            assert server.get("/config")[0] == 200, "the server is not blocked"
            yield page, fold, folder
    finally:
        kill_runs(data)


@pytest.mark.long
def test_a_probe_survives_a_reload_and_can_be_cancelled(browser, tmp_path):
    with probing(browser, tmp_path) as (_, fold, folder):
        fold.get_by_text("1 of 2").wait_for()  # its first line
        job = psutil.Process(json.loads((folder / ".jobs/probe.json").read_text())["pid"])
        until(lambda: len(job.children(recursive=True)) > 2, "its first stage trains")
        family = job.children(recursive=True)
        fold.get_by_role("button", name="Cancel").click()
        fold.locator(".hp-job-state[data-state=cancelled]").wait_for()
        assert fold.get_by_test_id("probe").is_visible()
        until(lambda: not [one for one in family if one.is_running()], "nothing of it is left")


@pytest.mark.long
def test_a_probe_ends_with_its_verdict(browser, tmp_path):
    with probing(browser, tmp_path) as (_, fold, _):
        fold.locator(".hp-job-state[data-state=done]").wait_for(timeout=400_000)
        assert "all train" in fold.locator(".hp-verdict").inner_text()
