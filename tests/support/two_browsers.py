"""Two browsers at once, one of them narrow and dark, on a page whose server is killed: shared by the tests of whole flows."""

import contextlib
from collections.abc import Iterator

from ui_helpers import Server
from ui_page import a_tab, open_page


@contextlib.contextmanager
def two_browsers(browser) -> Iterator[tuple]:
    """Two tabs in contexts of their own. Requests that failed while there was no server are no errors."""
    with a_tab(browser) as first, a_tab(browser, width=390, color_scheme="dark") as second:
        yield first, second
        for page in (first, second):
            page.errors[:] = [text for text in page.errors if "fetch" not in text]


def continue_draft(page, server: Server) -> None:
    """Open the draft that another browser made."""
    open_page(page, server)
    page.get_by_role("button", name="Continue a draft").click()
    with page.expect_navigation():
        page.locator(".hp-recent button").first.click()
    page.locator("body.hp-open").wait_for()
    page.locator(".hp-card").first.wait_for()


def stays_open(*pages) -> None:
    """Mark pages: the mark is gone after a reload."""
    for page in pages:
        page.evaluate("window.notReloaded = true")


def was_not_reloaded(page) -> bool:
    """Whether the page is the one that `stays_open` marked."""
    return page.evaluate("window.notReloaded === true")
