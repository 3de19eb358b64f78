"""A probe of a run in two browsers while the page's server is killed, and the run that is trained after it."""

import json
import time

import psutil
import pytest
from two_browsers import open_run, stays_open, two_browsers, was_not_reloaded
from ui_helpers import kill_runs, photos, serving, write_run
from ui_page import RUN_S, a_tab, field, state_is, until

import runs
from launch import short_run
from ui import jobs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of the tiny model that was not started."""
    data = tmp_path / "data"
    monkeypatch.setenv("HANGPROOF_DATA", str(data))
    fields = {"model": "tiny-flux", "backend": "diffusers", "trigger": "tok", "workers": 0, "max_train_steps": 4}
    yield runs.create(runs.make({"name": "cup", **fields}), photos("coffee.png", "chelsea.png"))
    kill_runs(data)


def probe_is(page, state: str) -> None:
    """Wait until the page shows the probe in this state."""
    page.get_by_test_id("fold-probe").locator(f".hp-job-state[data-state={state}]").wait_for(timeout=RUN_S * 1000)


@pytest.mark.timeout(1800)
def test_a_probe_in_two_browsers_goes_on_while_the_server_is_killed(browser, folder):
    data = folder.parent.parent
    with two_browsers(browser) as (one, other):
        with serving(data) as server:
            open_run(server, "cup", one, other)
            stays_open(one)
            stays_open(other)
            fold = one.get_by_test_id("fold-probe")
            fold.locator("summary").click()
            fold.get_by_test_id("probe").click()
            there = other.get_by_test_id("fold-probe")
            probe_is(other, "running")  # without a reload, and its fold is opened
            there.get_by_text("1 of 2").wait_for()
            field(other, "run-search").fill("cup")
            there.get_by_role("button", name="Cancel").click()
            for page in (one, other):
                probe_is(page, "cancelled")
                assert was_not_reloaded(page)
            assert field(other, "run-search").input_value() == "cup"

            until(there.get_by_test_id("probe").is_enabled, "the button of the other browser")
            there.get_by_test_id("probe").click()
            for page in (one, other):
                probe_is(page, "running")
            fold.get_by_text("1 of 2").wait_for()
            job = psutil.Process(json.loads((folder / jobs.FOLDER / "probe.json").read_text())["pid"])
            server.stop(hard=True)
        assert job.is_running() and jobs.read(folder, "probe").state == "running"
        with serving(data, port=server.port) as server:
            for page in (one, other):
                probe_is(page, "done")
                verdict = page.get_by_test_id("fold-probe").locator(".hp-verdict")
                verdict.get_by_text("all train").wait_for()
            one.locator("#go").click()
            for page in (one, other):
                state_is(page, "completed")
        assert json.loads((folder / "status.json").read_text())["step"] == 4
        assert not list((data / short_run.SCRATCH).glob("*")), "nothing of the probe is left"


def test_the_verdict_is_shown_although_the_first_requests_for_it_failed(browser, tmp_path):
    folder = write_run(tmp_path / "data", "cup", state="completed")
    (folder / jobs.FOLDER).mkdir()
    now = {"state": "done", "began_s": time.time(), "ended_s": time.time(), "pid": 1, "start": 0.0, "code": 0}
    (folder / jobs.FOLDER / "probe.json").write_text(json.dumps(now))
    (folder / jobs.FOLDER / "probe.out").write_text(json.dumps({"ok": True, "verdict": "They all train."}))
    failed = []

    def fail_once(route) -> None:
        if b"job_output" in (route.request.post_data_buffer or b"") and not failed:
            failed.append(route.request.url)
            route.abort()
        else:
            route.continue_()

    with serving(tmp_path / "data") as server, a_tab(browser) as page:
        page.route("**/component_server**", fail_once)
        open_run(server, "cup", page)
        page.get_by_test_id("fold-probe").locator("summary").click()
        page.get_by_test_id("fold-probe").get_by_text("They all train.").wait_for()
        assert failed
