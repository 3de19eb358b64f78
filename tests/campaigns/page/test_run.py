"""Real runs in two browsers: a trainer and then the page's server are killed in the middle, and charts, log, comparison
and samples show each run from its first step to its last."""

import contextlib
import os
import signal
import zipfile
from pathlib import Path

import pytest
from run_facts import status, step_of
from runs_helpers import sources
from ui_helpers import PACED, kill_runs, photos, serving
from ui_page import RUN_S, a_tab, assert_accessible, field, state_is, until

import runs
from ui.run import view

STEPS = 16
SAVE_EVERY = 4
SLOW = {**PACED, "HANGPROOF_PACE_S": "1.5"}


def create(name: str, rate: float) -> Path:
    """A run of the tiny model with a sample after half of it."""
    fields = {"name": name, "model": "tiny-flux", "backend": "diffusers", "trigger": "tok", "learning_rate": rate}
    length = {"epochs": STEPS // 2, "repeats": 2, "save_every_n_steps": SAVE_EVERY}
    length |= {"sample_every_n_steps": 8, "sample_steps": 1}
    return runs.create(runs.make({**fields, **length, "prompts": ["a cup"]}), sources(photos("coffee.png")))


def shows_every_step(page) -> None:
    """Wait until the loss chart has all steps as one line, with one mark for the restart."""
    page.locator("#run-charts").scroll_into_view_if_needed()  # what is not on the screen is not asked for
    chart = page.locator(f".hp-main-chart[aria-label^='Loss, step 1 to step {STEPS}']")
    chart.wait_for(timeout=RUN_S * 1000)
    until(lambda: page.locator(".hp-main-chart[aria-label*='Marked: ']:not([aria-label*='; '])").count() == 1, "a mark")


@pytest.mark.timeout(1500)
def test_a_run_is_complete_in_two_browsers_after_its_trainer_and_the_server_were_killed(browser, tmp_path, monkeypatch):
    data = tmp_path / "data"
    monkeypatch.setenv("HANGPROOF_DATA", str(data))
    one, two = create("one", 1e-4), create("two", 1e-3)
    try:
        with contextlib.ExitStack() as tabs:
            first = tabs.enter_context(a_tab(browser))
            second = tabs.enter_context(a_tab(browser, width=390, color_scheme="dark"))
            with serving(data, **SLOW) as server:
                for page in (first, second):
                    page.goto(f"{server.url}/?run=one")
                    page.locator("body.hp-open").wait_for()
                first.locator("#go").click()
                until(lambda: (one / "status.json").exists() and step_of(one) >= 6, "step 6", RUN_S)
                for page in (first, second):
                    page.locator("#run-charts").scroll_into_view_if_needed()
                    page.locator(".hp-main-chart").wait_for()
                until(lambda: status(one)["step"] % SAVE_EVERY == 2, "steps that no checkpoint has")
                [trainer] = status(one)["trainer_pids"]
                os.kill(trainer, signal.SIGKILL)
                server.stop(hard=True)
            with serving(data, port=server.port) as server:
                for page in (first, second):
                    state_is(page, "completed")
                    shows_every_step(page)
                assert view.with_metrics(one, lambda found: found.steps["step"].tolist()) == list(range(1, STEPS + 1))
                assert status(one)["restarts"] == 1
                evolution(first)
                log_and_incident(first, second)
                download(second, one)
                comparison(first, two)
                assert_accessible(second)
            for page in (first, second):
                page.errors[:] = [text for text in page.errors if "fetch" not in text]  # while there was no server
    finally:
        kill_runs(data)


def evolution(page) -> None:
    """The samples before and after the restart are one series."""
    page.locator("#samples-fold button.label-wrap").first.click()
    pictures = page.locator("#samples-gallery img")
    steps = "(all) => all.map((one) => one.alt.split(' · ')[0])"
    until(lambda: set(pictures.evaluate_all(steps)) == {"Step 8", f"Step {STEPS}"}, "the samples of both steps")


def log_and_incident(page, other) -> None:
    """The keyboard opens the incident's report; the log finds the second attempt."""
    other.locator("#incident-0001 summary").first.focus()
    other.keyboard.press("Enter")
    other.locator("#incident-0001 .hp-report").first.wait_for()
    page.locator("#log-fold button.label-wrap").click()
    field(page, "log-query").fill("attempt 2")
    page.get_by_role("region", name="Training log").get_by_text("attempt 2").first.wait_for()


def download(page, folder: Path) -> None:
    with page.expect_download() as found:
        page.get_by_test_id("download-all").click()
    with zipfile.ZipFile(found.value.path()) as archive:
        assert archive.testzip() is None
        assert archive.read("one/one.safetensors") == (folder / "one.safetensors").read_bytes()


def comparison(page, folder: Path) -> None:
    """A second run is trained, and compared with the first."""
    page.locator("#run-list [data-run=two]").click()
    page.locator("[data-testid=run-name][data-run=two]").wait_for()
    page.locator("#go").click()
    state_is(page, "completed")
    page.locator("#compare-fold button.label-wrap").first.click()
    page.locator("#compare-runs input").click()
    page.get_by_role("option", name="one").click()
    page.locator("#compare-loss svg.marks").wait_for()
    table = page.get_by_role("region", name="Settings that differ")
    rate = table.get_by_role("row", name="Learning rate")
    until(lambda: rate.inner_text().split()[2:] == ["0.001", "0.0001"], "both learning rates")
    page.get_by_role("img", name=f"one, step {STEPS}").first.wait_for()
