"""Files of the page that do not arrive, and a connection that breaks between two answers."""

import contextlib
import re

from playwright.sync_api import TimeoutError
from ui_page import a_tab, field, nothing_is_kept, open_page, until


def test_a_page_whose_files_do_not_arrive_loads_again(browser, server):
    with a_tab(browser) as page:
        refused = []

        def refuse(route):
            kind = route.request.url.rpartition(".")[2]
            if refused.count(kind) < 3:  # of several loads of the page
                refused.append(kind)
                route.abort("failed")
            else:
                route.continue_()

        page.route(re.compile(r"/assets/[^/]*\.css$|/scripts/page-[^/]*\.js$"), refuse)
        open_page(page, server)
        assert sorted(refused) == ["css"] * 3 + ["js"] * 3
        page.locator("#start").click()  # it works
        page.locator(".hp-problem").first.wait_for()
        page.errors.clear()  # of the files that did not arrive


def test_buttons_work_after_the_stream_of_answers_broke(browser, server):
    with a_tab(browser) as page:
        open_page(page, server)
        field(page, "name").fill("kept")
        until(lambda: nothing_is_kept(page), "the server has what was typed")
        page.route("**/queue/data*", lambda route: route.abort("connectionreset"), times=1)
        page.evaluate("window.notReloaded = true")
        with page.expect_request("**/queue/data*"):
            page.locator("#start").click()
        # The click has its answer on another stream, or, where it already waited for this one, the page loads again.
        answer = page.locator("#problem").get_by_text("Add at least one image")
        again = "!window.notReloaded && document.body?.matches('.hp-open')"
        until(lambda: page.evaluate(again) or answer.is_visible(), "an answer or a new page")

        def works() -> bool:
            page.locator("#start").click()
            with contextlib.suppress(TimeoutError):  # an event that was lost with the stream loads the page again now
                answer.wait_for(timeout=5000)
            return answer.is_visible()

        until(works, "the button works")
        assert field(page, "name").input_value() == "kept"
        page.errors.clear()  # of the time without a connection
