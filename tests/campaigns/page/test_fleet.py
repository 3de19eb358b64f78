"""A run on another machine, watched in two browsers through a folder store, while the page's server is killed in the middle of its stop."""

from dataclasses import replace
from pathlib import Path

import pytest
from two_browsers import open_tab, trained_steps, two_browsers
from ui_helpers import kill_runs, photos, serving
from ui_page import RUN_S, until

import runs
from benchmarks import faults_reference as ref
from benchmarks.machines import Machine, Training, tiny

STEPS, EVERY, STEP_S = 2000, 10, 0.5


def far_training() -> Training:
    """The built-in trainer on the tiny model, for longer than the test lasts: it must be stopped."""

    def create(data: Path, fields: dict) -> Path:
        known = {
            "name": "far",
            "model": "tiny-flux",
            "backend": "diffusers",
            "tier": "16G",
            "resolution": 64,
            "trigger": "tok",
        }
        length = {
            "max_train_steps": STEPS,
            "save_every_n_steps": EVERY,
            "sample_every_n_steps": EVERY,
            "sample_steps": 1,
        }
        with ref.data_root(data):
            return runs.create(
                runs.make({**known, **length, "workers": 0, "prompts": ["a cup"], **fields}), photos("coffee.png")
            )

    def environment(data: Path) -> dict[str, str]:
        data.mkdir(parents=True, exist_ok=True)
        pace = {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_PACE_S": str(STEP_S), "OMP_NUM_THREADS": "1"}
        return ref.environment(data, **pace)

    return replace(tiny(STEPS, EVERY, STEP_S), name="far", create=create, environment=environment)


def card_of(page):
    """The run's card."""
    return page.locator(".hp-far[data-run=far]")


def step_on(page) -> int:
    """The step that a card shows; 0 without one."""
    found = card_of(page).locator("dl div", has_text="Step").locator("dd")
    return int(found.first.inner_text().split()[0].replace(",", "")) if found.count() else 0


def shows(page, state: str) -> None:
    """Wait until the card shows this state."""
    card_of(page).get_by_test_id("far-state").get_by_text(state, exact=True).wait_for(timeout=RUN_S * 1000)


@pytest.mark.timeout(1800)
def test_a_run_far_away_is_stopped_by_one_browser_and_both_see_it_although_the_server_is_killed_meanwhile(
    browser, tmp_path
):
    store, data = str(tmp_path / "store"), tmp_path / "data"
    training = far_training()
    far = Machine(training, tmp_path / "far", limits={"bandwidth_bytes": 0})
    training.create(far.data, {"store": store})
    try:
        far.run()
        with two_browsers(browser) as (first, second):
            with serving(data) as server:
                open_tab(server, "fleet", first, second)
                first.get_by_test_id("store-address").fill(store)
                first.get_by_role("button", name="Add store").click()
                for page in (first, second):  # the second one sees what the first one added
                    shows(page, "Training")
                before = step_on(first)
                for page in (first, second):
                    until(lambda page=page: step_on(page) > before, "progress without a reload", RUN_S)
                    card_of(page).locator("img").first.wait_for()
                server.stop(hard=True)  # while both look
                for page in (first, second):
                    page.get_by_test_id("fleet-unanswered").get_by_text("Hangproof does not answer").wait_for()
                    card_of(page).wait_for()  # what was read last stays

            seen = step_on(first)
            with serving(data, port=server.port) as server:
                for page in (first, second):
                    until(lambda page=page: step_on(page) > seen, "progress after the restart, without a reload", RUN_S)
                    page.get_by_test_id("fleet-unanswered").wait_for(state="hidden")
                second.get_by_role("button", name="Stop far").click()
                for page in (first, second):
                    card_of(page).get_by_text("Stop requested").wait_for()
                server.stop(hard=True)  # the machine far away may not have read it yet
            assert far.wait(RUN_S) == 3, far.output()  # stopped by the user
            with serving(data, port=server.port):
                for page in (first, second):
                    shows(page, "Stopped")
                    assert card_of(page).get_by_test_id("far-stop").count() == 0
        stopped = far.status()
        assert stopped["state"] == "stopped" and far.newest_checkpoint() == stopped["step"] < STEPS
        assert trained_steps(far.folder) == list(range(1, stopped["step"] + 1))
    finally:
        far.kill()
        kill_runs(data)
