"""A sweep of real trainings, made on the page and watched in two browsers, with the page's server killed in its middle."""

import json

from monitor_helpers import wait_for
from ui_helpers import photos, serving
from ui_page import RUN_S, a_tab, choose_tiny, drop, field, open_page, serious, until

from jobs import queue

NAMES = ("bird-r2-lr1e-4", "bird-r2-lr5e-4", "bird-r4-lr1e-4", "bird-r4-lr5e-4")


def states(data) -> list[str]:
    """The state of each run that has begun."""
    return [json.loads(path.read_text())["state"] for path in sorted((data / "outputs").glob("bird-*/status.json"))]


def test_a_sweep_in_two_browsers_goes_on_while_the_server_is_killed(browser, data):
    gpu = {"HANGPROOF_GPUS": "test"}  # one run at a time
    with a_tab(browser) as page, a_tab(browser, width=390, color_scheme="dark") as other:
        with serving(data, **gpu) as server:
            open_page(page, server)
            drop(page, *photos("coffee.png", "chelsea.png"), count=2)
            choose_tiny(page)
            for key, text in (("name", "bird"), ("trigger", "ohwx"), ("epochs", "1"), ("repeats", "12")):
                field(page, key).fill(text)
                field(page, key).blur()
            page.locator("#sweep button.label-wrap").first.click()
            field(page, "sweep-rank").fill("2, four")
            plan, go = page.locator("#sweep-plan"), page.locator("#sweep-start")
            plan.get_by_text("'four' is not").wait_for()
            assert go.is_disabled()
            field(page, "sweep-rank").fill("2, 4")
            field(page, "sweep-learning_rate").fill("1e-4, 5e-4")
            until(go.is_enabled, "the plan")
            until(lambda: all(name in plan.inner_text() for name in NAMES), "the runs' names")
            go.press("Enter")  # by keyboard
            wait_for(lambda: "running" in states(data), timeout_s=RUN_S, what="its first run")
            assert [one.total for one in queue.read().entries] == [4], "one entry of the queue"
            other.goto(f"{server.url}/?run={NAMES[0]}")
            other.locator(f"[data-testid=run-name][data-run='{NAMES[0]}']").wait_for()
            other.locator(".hp-queue li").first.wait_for()
            server.stop(hard=True)
            began = len(states(data))
        wait_for(lambda: len(states(data)) > began, timeout_s=RUN_S, what="the next run, without the page")
        with serving(data, port=server.port, **gpu) as server:
            for one in (page, other):
                one.goto(f"{server.url}/?run={NAMES[-1]}")
                one.locator("body.hp-open").wait_for()
            wait_for(lambda: states(data) == ["completed"] * 4, timeout_s=RUN_S, what="all of its runs")
            for one in (page, other):
                one.locator(f"[data-testid=run-name][data-run='{NAMES[-1]}']").wait_for(timeout=RUN_S * 1000)
                one.locator("[data-testid=state][data-state=completed]").wait_for()
            page.locator("#compare-fold button.label-wrap").first.click()
            page.locator("#compare-runs input").click()
            page.get_by_role("option", name=NAMES[0]).first.click()
            page.get_by_role("region", name="Settings that differ").get_by_role("row", name="Rank").wait_for()
            assert serious(other) == []
        for one in (page, other):
            one.errors[:] = [text for text in one.errors if "fetch" not in text]  # while there was no server
