"""A probe of a run in two browsers while the page's server is killed, and the run that is trained after it."""

import json

import psutil
import pytest
from two_browsers import open_check, open_run, stays_open, two_browsers, was_not_reloaded
from ui_helpers import kill_runs, photos, serving
from ui_page import RUN_S, field, state_is

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
    page.locator(f"#check-probe .hp-job-state[data-state={state}]").wait_for(timeout=RUN_S * 1000)


@pytest.mark.timeout(1800)
def test_a_probe_in_two_browsers_goes_on_while_the_server_is_killed(browser, folder):
    data = folder.parent.parent
    with two_browsers(browser) as (one, other):
        with serving(data) as server:
            open_run(server, "cup", one, other)
            stays_open(one)
            stays_open(other)
            fold, there = open_check(one, "probe"), open_check(other, "probe")
            one.locator("#start-probe").click()
            probe_is(other, "running")  # without a reload
            there.get_by_text("1 of 2").wait_for()
            field(other, "run-search").fill("cup")
            there.get_by_role("button", name="Cancel").click()
            for page in (one, other):
                probe_is(page, "cancelled")
                assert was_not_reloaded(page)
            assert field(other, "run-search").input_value() == "cup"

            other.locator("#start-probe").click()
            for page in (one, other):
                probe_is(page, "running")
            fold.get_by_text("1 of 2").wait_for()
            job = psutil.Process(json.loads((folder / jobs.FOLDER / "probe.json").read_text())["pid"])
            server.stop(hard=True)
        assert job.is_running() and jobs.read(folder, "probe").state == "running"
        with serving(data, port=server.port) as server:
            for page in (one, other):
                page.wait_for_function("window.notReloaded === undefined")
                page.locator("body.hp-open").wait_for()
                check = open_check(page, "probe")
                probe_is(page, "done")
                check.locator(".hp-verdict").get_by_text("all train").wait_for()
            one.locator("#go").click()
            for page in (one, other):
                state_is(page, "completed")
        assert json.loads((folder / "status.json").read_text())["step"] == 4
        assert not list((data / short_run.SCRATCH).glob("*")), "nothing of the probe is left"
