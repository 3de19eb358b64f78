"""A connection that breaks, as when the machine's network changes or the server restarts, leaves no page that is empty or dead."""

import pytest
from ui_helpers import serving
from ui_page import a_tab, field, open_page, until


@pytest.mark.parametrize(
    "files",
    [
        "**/assets/*.css",
        *(
            pytest.param(files, marks=pytest.mark.long)
            for files in ("**/assets/Index-*.js", "**/scripts/page-*.js", "**/assets/index-*.js")
        ),
    ],
)
def test_a_page_whose_files_do_not_arrive_loads_again(browser, server, files):
    with a_tab(browser) as page:
        refused = []

        def refuse(route):
            if len(refused) < 6:  # more than one load of the page
                refused.append(route.request.url)
                route.abort("failed")
            else:
                route.continue_()

        page.route(files, refuse)
        open_page(page, server)
        assert len(refused) == 6
        page.locator("#start").click()  # it works
        page.locator(".hp-problem").first.wait_for()
        page.errors.clear()  # of the files that did not arrive


def test_buttons_work_after_the_stream_of_answers_broke_between_two_answers(browser, tmp_path):
    data = tmp_path / "data"
    with a_tab(browser) as page:
        began, streams = [], set()
        page.on("request", lambda one: "queue/data" in one.url and (began.append(one), streams.add(one)))
        for ended in ("requestfinished", "requestfailed"):
            page.on(ended, lambda one: streams.discard(one))
        with serving(data) as server:
            open_page(page, server)
            until(lambda: page.wait_for_timeout(50) or (began and not streams), "no event is pending")
            page.locator("#start").click()
            page.locator(".hp-problem").first.wait_for()
            server.stop(hard=True)  # while the stream waits for the next event (LINGER_S of ui/streams.py)
        with serving(data, port=server.port):
            field(page, "name").fill("kept")
            page.locator(".hp-problem").first.evaluate("(one) => one.remove()")
            page.locator("#start").click()
            page.locator(".hp-problem").first.wait_for()
            assert field(page, "name").input_value() == "kept"
        page.errors.clear()  # of the time without a server
