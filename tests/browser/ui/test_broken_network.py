"""Files of the page that do not arrive, and a connection that breaks between two answers."""

import re

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


def test_buttons_work_after_the_stream_of_answers_broke_between_two_answers(browser, server):
    with a_tab(browser) as page:
        streams: set = set()
        broken: list = []
        page.on("request", lambda request: "queue/data" in request.url and streams.add(request))
        page.on("requestfinished", lambda request: streams.discard(request))
        page.on("requestfailed", lambda request: "queue/data" in request.url and broken.append(request))
        problem = page.locator("#problem")

        def open_stream_without_events() -> bool:
            """Whether the stream waits for the next event, which it does for a second (LINGER_S of ui/streams.py)."""
            page.evaluate(
                "drawn = 0; new MutationObserver(() => drawn++).observe(problem, {childList: true, subtree: true})"
            )
            page.locator("#start").click()  # its answers are "Please wait", then what is missing
            until(lambda: page.evaluate("drawn > 0"), "an answer")
            problem.get_by_text("Give your LoRA a name").wait_for()
            page.wait_for_timeout(200)  # the event ends after its last answer
            return bool(streams)

        def break_stream_between_two_answers() -> bool:
            """Whether the stream broke; one that ended by itself just before is followed by another."""
            if not open_stream_without_events():
                return False
            page.context.set_offline(True)
            until(lambda: page.wait_for_timeout(50) or broken or not streams, "the stream is gone")
            page.context.set_offline(False)
            return bool(broken)

        open_page(page, server)
        until(break_stream_between_two_answers, "the stream broke")
        field(page, "name").fill("kept")
        until(lambda: nothing_is_kept(page), "the server has what was typed")
        page.locator("#start").click()
        problem.get_by_text("Give your LoRA a name").wait_for(state="detached")
        problem.get_by_text("Add at least one image").wait_for()  # the click has its answer
        assert field(page, "name").input_value() == "kept"
        page.errors.clear()  # of the time without a connection
