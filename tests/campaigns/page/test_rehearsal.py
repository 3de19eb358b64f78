"""A rehearsal of a draft in two browsers while the page's server is killed, and the run that is trained after it."""

import contextlib
import json

import pytest
from ui_helpers import PACED, photos, serving
from ui_page import RUN_S, a_tab, choose_tiny, drop, faint_texts, field, open_page, state_is, until

from launch import rehearse
from ui import jobs
from ui.new import rehearsal

SLOW = {**PACED, "HANGPROOF_PACE_S": "4"}


@contextlib.contextmanager
def two_browsers(browser):
    """Two tabs in contexts of their own. Requests that failed while there was no server are no errors."""
    with a_tab(browser) as first, a_tab(browser, width=390, color_scheme="dark") as second:
        yield first, second
        for page in (first, second):
            page.errors[:] = [text for text in page.errors if "fetch" not in text]


def rehearsal_is(page, state: str) -> None:
    """Wait until the page shows the rehearsal in this state."""
    page.locator(f".hp-rehearsal[data-state={state}]").wait_for(timeout=RUN_S * 1000)


@pytest.mark.timeout(1800)
def test_a_rehearsal_in_two_browsers_goes_on_while_the_server_is_killed(browser, data):
    with two_browsers(browser) as (one, other):
        with serving(data, **SLOW) as server:
            open_page(one, server)
            drop(one, *photos("coffee.png", "chelsea.png"), count=2)
            choose_tiny(one)
            for key, text in (("name", "bird"), ("trigger", "ohwx"), ("epochs", "1"), ("repeats", "2")):
                field(one, key).fill(text)
                field(one, key).blur()
            open_page(other, server)
            other.get_by_role("button", name="Continue a draft").click()
            with other.expect_navigation():
                other.locator(".hp-recent button").first.click()
            other.locator("body.hp-open").wait_for()
            other.locator(".hp-card").first.wait_for()
            for page in (one, other):
                page.evaluate("window.notReloaded = true")
                page.locator("#rehearsal button.label-wrap").first.click()
            one.locator("#rehearse").click()
            rehearsal_is(other, "running")  # without a reload
            until(lambda: field(other, "name").input_value() == "bird", "the form in the other browser")
            field(other, "name").fill("owl")
            field(other, "name").blur()
            other.locator("#cancel-rehearsal").click()
            rehearsal_is(one, "cancelled")
            rehearsal_is(other, "cancelled")
            assert one.evaluate("window.notReloaded") and other.evaluate("window.notReloaded")
            folder = rehearsal.rehearsal_folder(one.evaluate("window.hangproof.draft()"))
            until(lambda: not list((data / rehearse.SCRATCH).glob("*")), "nothing of it is left")

            other.locator("#rehearse").click()
            rehearsal_is(one, "running")
            one.locator(".hp-stage[data-stage=train][data-state=running]").wait_for(timeout=RUN_S * 1000)
            server.stop(hard=True)
            field(other, "name").fill("typed without a server")
        assert jobs.read(folder, rehearsal.JOB).state == "running"
        with serving(data, port=server.port, **SLOW) as server:
            for page in (one, other):
                page.get_by_test_id("unsaved-banner").wait_for(state="hidden")
                page.wait_for_function("!window.notReloaded")  # it has loaded itself again
                page.locator("body.hp-open").wait_for()
                page.locator("#rehearsal button.label-wrap").first.click()
                rehearsal_is(page, "passed")
                assert {stage.get_attribute("data-state") for stage in page.locator(".hp-stage").all()} == {"done"}
            until(lambda: field(other, "name").input_value() == "typed without a server", "the typed text")
            other.locator(".hp-verdict.hp-done").wait_for()  # the result belongs to these settings
            assert not faint_texts(other)
            found = rehearse.read(folder)
            assert found.state == rehearse.PASSED and found.measured["step_s"] > 0

            other.get_by_role("button", name="Start training").click()
            state_is(other, "completed")
        run = data / "outputs" / "typed-without-a-server"
        assert json.loads((run / "status.json").read_text())["step"] == 4
        assert rehearse.read(run).state == rehearse.PASSED, "the run keeps its rehearsal"
