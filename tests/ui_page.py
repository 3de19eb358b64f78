"""What a person does on the page, as functions of a Playwright page: type, drop, choose, start, wait for a state."""

import contextlib
import re
import time
from collections.abc import Iterator

from playwright.sync_api import TimeoutError

PATIENCE_S = 90  # for anything of the page itself: a machine that is busy with other work answers late, but it answers
RUN_S = 400  # for a run on the tiny model, likewise


@contextlib.contextmanager
def a_tab(browser, width: int = 1280, height: int = 900, **options) -> Iterator:
    """A fresh tab; at its end nothing may have been asked outside this machine, failed, or complained."""
    faults = []
    context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True, **options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    page.on("request", lambda r: r.url.startswith(("http://127.0.0.1:", "data:", "blob:")) or faults.append(r.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    page.faults = faults
    try:
        yield page
    finally:
        context.close()
    assert faults == []


def field(page, key: str):
    """The input of a field."""
    return page.locator(f"#{key} input, #{key} textarea").first


def open_page(page, server) -> None:
    """Open the page and wait until it may be typed into."""
    page.goto(server.url)
    page.locator("body.hp-open").wait_for()


def drop(page, *paths, count: int) -> None:
    """Hand files to the drop zone and wait until there are so many images."""
    page.get_by_test_id("image-picker").set_input_files([str(p) for p in paths])
    page.get_by_test_id("image-count").get_by_text(f"{count} image", exact=False).wait_for()


def captions(page) -> dict[str, str]:
    """Captions in the cards by image."""
    cards = page.locator(".hp-card")
    return {
        cards.nth(n).get_attribute("data-file"): cards.nth(n).locator("textarea").input_value()
        for n in range(cards.count())
    }


def caption(page, file: str):
    """The box of an image's caption."""
    return page.locator(f".hp-card[data-file='{file}'] textarea")


def saved(page, file: str) -> None:
    """Wait until a caption is stored."""
    page.locator(f".hp-card[data-file='{file}'] .hp-saved").get_by_text("saved", exact=True).wait_for()


def until(true, what: str, seconds: float = PATIENCE_S) -> None:
    """Wait for something outside the page; fails by its name."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def choose_tiny(page) -> None:
    """Choose the tiny base model in the list."""
    field(page, "model").click()
    page.get_by_role("option", name=re.compile("Tiny Flux")).click()


def state_is(page, *states: str, seconds: float = RUN_S) -> None:
    """Wait until the run page shows one of these states."""
    wanted = ", ".join(f"[data-testid=state][data-state={state}]" for state in states)
    try:
        page.locator(wanted).wait_for(timeout=seconds * 1000)
    except TimeoutError as error:
        raise AssertionError(
            f"not {states} within {seconds} s; the page says: {page.locator('.hp-main').inner_text()}"
        ) from error


def step_of(page) -> int:
    """The step that the run page shows."""
    return int(page.get_by_test_id("steps").get_attribute("data-step") or 0)


def reaches(page, step: int, seconds: float = RUN_S) -> None:
    """Wait until the run page shows so many steps."""
    until(lambda: step_of(page) >= step, f"step {step} on the page", seconds)
