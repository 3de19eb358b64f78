"""A run is stopped, resumed and trained longer in a browser."""

import re

import pytest
from ui_helpers import PACED, serving
from ui_page import RUN_S, field, set_up_run, state_is, step_of, until


@pytest.mark.timeout(1200)
def test_a_run_is_monitored_stopped_and_resumed_from_its_checkpoint(tab, data):
    # Slow, so that a page on a busy machine has a minute between step 2 and the end; resumed at full speed.
    with serving(data, **{**PACED, "HANGPROOF_PACE_S": "2.5"}) as server:
        folder = set_up_run(tab, server, "stopped", repeats="1", epochs="6", save_every_n_steps="20")
        until(lambda: step_of(tab) >= 2, "step 2 on the page", RUN_S)
        other = tab.context.new_page()
        other.goto(server.url)  # a new page shows the running run
        other.get_by_test_id("run-name").get_by_text("stopped").wait_for()
        other.close()
        tab.locator("#stop").click()
        state_is(tab, "stopped")
        done = step_of(tab)
        assert 2 <= done < 24
        tab.goto("about:blank")  # an open page would reconnect during the next lines
    with serving(data, port=server.port):
        tab.goto(f"{server.url}?run=stopped")
        tab.locator("#go").get_by_text("Resume").click()
        state_is(tab, "completed")
        tab.errors.clear()
        assert step_of(tab) == 24

        tab.locator("#go").get_by_text("Train longer").click()
        told = "Total epochs: Already trained for 6 epochs; enter a larger number"
        tab.locator("#run-notice").get_by_text(told).wait_for()
        field(tab, "total").fill("8")
        tab.locator("#go").get_by_text("Train longer").click()
        tab.get_by_test_id("steps").get_by_text("32 of 32 steps").wait_for(timeout=RUN_S * 1000)
        state_is(tab, "completed")
        steps = [int(s) for s in re.findall(r'"step": ?(\d+)', (folder / "metrics.jsonl").read_text())]
        assert steps == [*range(1, 33)]  # none repeated: it continued from the stop's checkpoint, and then from its end
        tab.locator("#run-charts").scroll_into_view_if_needed()  # what is not on the screen is not asked for
        tab.locator(".hp-main-chart[aria-label^='Loss, step 1 to step 32']").wait_for()
        label = lambda: tab.locator(".hp-main-chart").get_attribute("aria-label") or ""  # noqa: E731
        until(lambda: label().count("continued at") == 2, "where it continued")
