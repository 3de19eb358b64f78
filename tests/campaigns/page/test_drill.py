"""The hang drill in two browsers: the page's server is killed between freeze and recovery."""

from pathlib import Path

import pytest
from monitor_helpers import events
from safetensors.numpy import load_file
from short_run_helpers import nothing_runs
from two_browsers import open_tab, status, two_browsers
from ui_helpers import serving
from ui_page import RUN_S, state_is, until

from launch import drill


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
            open_tab(server, "doctor", first)
            first.get_by_label("What freezes").click()
            first.get_by_role("option", name=drill.FAULTS["worker"].label).click()
            first.locator("#doctor-drill-start").click()
            first.get_by_test_id("drill").wait_for()
            folder = data / "outputs" / first.get_by_test_id("run-name").get_attribute("data-run")
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
