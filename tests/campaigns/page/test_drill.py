"""The hang drill in two browsers: the page's server is killed between freeze and recovery; a second drill is stopped by the other browser."""

import json
from pathlib import Path

import pytest
from monitor_helpers import events
from safetensors.numpy import load_file
from short_run_helpers import nothing_runs
from two_browsers import open_tab, status, two_browsers
from ui_helpers import serving
from ui_page import RUN_S, state_is, until

from launch import drill
from ui.run import view


def start(page, server, kind: str) -> Path:
    """Start a drill in the tab Doctor; the run's folder."""
    open_tab(server, "doctor", page)
    page.get_by_label("What freezes").click()
    page.get_by_role("option", name=drill.FAULTS[kind].label).click()
    page.locator("#doctor-drill-start").click()
    page.get_by_test_id("drill").wait_for()
    return server.data / "outputs" / page.get_by_test_id("run-name").get_attribute("data-run")


def stage_is(page, stage: str, state: str) -> None:
    """Wait until the page shows a stage of the drill in this state."""
    page.locator(f".hp-drill [data-stage={stage}][data-state={state}]").wait_for(timeout=RUN_S * 1000)


def kinds(folder: Path) -> list[str]:
    """The kinds of a run's events."""
    return [event["kind"] for event in events(folder)]


@pytest.mark.timeout(1500)
def test_a_drill_recovers_in_two_browsers_although_the_server_is_killed_after_the_freeze(browser, data):
    with two_browsers(browser) as (first, second):
        with serving(data) as server:
            open_tab(server, "runs", second)
            folder = start(first, server, "worker")
            for page in (first, second):
                stage_is(page, "train", "running")
            until(lambda: status(folder)["step"] >= drill.FREEZE_AT, "the freeze", RUN_S)
            server.stop(hard=True)
            assert "progress" not in kinds(folder), "killed before the recovery"
        with serving(data, port=server.port):
            for page in (first, second):
                for stage in ("freeze", "detect", "explain", "kill", "restart", "recover", "end"):
                    stage_is(page, stage, "done")
                state_is(page, "completed")
                page.get_by_text("First new step after").wait_for()
                page.get_by_test_id("incident").first.wait_for()
        times = drill.times(folder)
        assert list(times) == ["detected", "killed", "restarted", "recovered"]
        assert list(times.values()) == sorted(times.values())
        assert kinds(folder).count("hang") == 1 and kinds(folder).count("restarted") == 1
        assert load_file(folder / f"{folder.name}.safetensors")
    assert nothing_runs(data)


@pytest.mark.timeout(1500)
def test_the_other_browser_stops_a_drill_that_is_frozen(browser, data):
    with two_browsers(browser) as (first, second):
        with serving(data) as server:
            open_tab(server, "runs", second)
            folder = start(first, server, "stopped")
            until(lambda: status(folder).get("step", 0) >= drill.FREEZE_AT, "the freeze", RUN_S)
            second.locator("#stop").click()
            second.locator(
                "#stop", has_text="Stopping…"
            ).wait_for()  # which the browser says before the server has heard
            until(lambda: view.stop_requested(folder) or status(folder)["state"] in ("stopping", "stopped"), "the stop")
            server.stop(hard=True)
        with serving(data, port=server.port):
            for page in (first, second):
                state_is(page, "stopped")
                stage_is(page, "freeze", "done")
                stage_is(page, "recover", "skipped")
                stage_is(page, "end", "done")
    assert json.loads((folder / drill.FILE).read_text())["kind"] == "stopped"
    assert "progress" not in kinds(folder)[kinds(folder).index("stopped") :]
    assert nothing_runs(data)
