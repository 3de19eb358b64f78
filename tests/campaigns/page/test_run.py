"""A real run in two browsers: its trainer and then the page's server are killed in the middle, and its chart shows it from
its first step to its last."""

import os
import signal

import pytest
from run_facts import status, step_of
from runs_helpers import sources
from ui_helpers import PACED, photos, serving
from ui_page import RUN_S, a_tab, assert_accessible, state_is, until

import runs
from ui.run import view

STEPS = 16
SAVE_EVERY = 4
SLOW = {**PACED, "HANGPROOF_PACE_S": "1.5"}


@pytest.mark.timeout(1500)
def test_a_run_is_complete_in_two_browsers_after_its_trainer_and_the_server_were_killed(browser, data):
    fields = {"name": "one", "model": "tiny-flux", "backend": "diffusers", "trigger": "tok"}
    length = {"epochs": STEPS // 2, "repeats": 2, "save_every_n_steps": SAVE_EVERY}
    folder = runs.create(runs.make({**fields, **length}), sources(photos("coffee.png")))
    with a_tab(browser) as first, a_tab(browser, width=390, color_scheme="dark") as second:
        pages = (first, second)
        with serving(data, **SLOW) as server:
            for page in pages:
                page.goto(f"{server.url}/?run=one")
                page.locator("body.hp-open").wait_for()
            first.locator("#go").click()
            until(lambda: (folder / "status.json").exists() and step_of(folder) >= 6, "step 6", RUN_S)
            for page in pages:
                page.locator("#run-charts").scroll_into_view_if_needed()
                page.locator(".hp-main-chart").wait_for()
            until(lambda: status(folder)["step"] % SAVE_EVERY == 2, "steps that no checkpoint has")
            [trainer] = status(folder)["trainer_pids"]
            os.kill(trainer, signal.SIGKILL)
            server.stop(hard=True)
        with serving(data, port=server.port):
            for page in pages:
                state_is(page, "completed")
                page.locator("#run-charts").scroll_into_view_if_needed()  # what is not on the screen is not asked for
                page.locator(f".hp-main-chart[aria-label^='Loss, step 1 to step {STEPS}']").wait_for(
                    timeout=RUN_S * 1000
                )
                one_mark = page.locator(".hp-main-chart[aria-label*='Marked: ']:not([aria-label*='; '])")
                until(lambda mark=one_mark: mark.count() == 1, "a mark for the restart")
            steps = view.with_metrics(folder, lambda found: found.steps["step"].tolist())
            assert steps == list(range(1, STEPS + 1)) and status(folder)["restarts"] == 1
            assert_accessible(second)
        for page in pages:
            page.errors[:] = [text for text in page.errors if "fetch" not in text]  # while there was no server
