"""The list of runs beside the run: with many runs and a queue, all of it stays in sight in low and wide windows."""

from ui_helpers import serving, write_run
from ui_page import a_tab, has_focus, open_page, show_run, until

from jobs import queue
from runs import slug

NUMBER, WAITING = 30, ("cat 03", "cat 04")
SEARCH = "#run-search textarea, #run-search input"


def box(page, selector: str) -> dict[str, float]:
    """Where an element is, in pixels."""
    place = page.locator(selector).first.bounding_box()
    assert place, f"{selector} is not shown"
    return place


def test_search_queue_and_list_are_all_there_with_30_runs(browser, data):
    with serving(data) as server, a_tab(browser) as page:
        open_page(page, server)
        page.get_by_role("tab", name="Runs").click()
        page.locator("#run-head").get_by_text("No run selected").wait_for()
        for number in range(NUMBER):
            write_run(data, f"cat {number:02}", state="completed", step=100)
        for name in WAITING:
            queue.insert(data / "outputs" / slug(name))
        show_run(page, server, slug("cat 00"))
        page.locator("#log-fold").wait_for()
        page.locator(".hp-queue ol > li").first.wait_for()
        for width in (1024, 1920):
            page.set_viewport_size({"width": width, "height": 768})
            page.evaluate("window.scrollTo(0, 0)")
            side = box(page, ".hp-side")
            for part in (SEARCH, "#run-queue", ".hp-run"):
                place = box(page, part)
                assert place["height"] > 20 and place["width"] > 150, (width, part, place)
                assert place["x"] >= side["x"] - 1, (width, part)
                assert place["x"] + place["width"] <= side["x"] + side["width"] + 1, (width, part)
            assert page.locator("#run-list .hp-run").count() == NUMBER
            assert box(page, SEARCH)["y"] < 768, width
            last = page.locator("#run-list .hp-run").last
            last.scroll_into_view_if_needed()
            place = last.bounding_box()
            assert place and side["y"] - 1 <= place["y"] and place["y"] + place["height"] <= 769, width
        # The queue is changed by keyboard and by pointer.
        page.get_by_role("button", name="Move up: cat 04").press("Enter")
        page.locator(".hp-queue ol > li:first-child[data-run='cat-04']").wait_for()
        has_focus(page, "aria-label", "Move up: cat 04")
        page.get_by_role("button", name="Remove from the queue: cat 03").click()
        page.locator(".hp-queue li[data-run='cat-03']").wait_for(state="detached")
        assert [one.run for one in queue.read().entries] == ["cat-04"]


def test_a_hidden_page_asks_the_server_nothing_until_it_is_shown_again(browser, data):
    write_run(data, "cat", state="completed", step=100)
    with serving(data) as server, a_tab(browser) as page:
        show_run(page, server, slug("cat"))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/gradio_api/" in request.url else None)

        def shown(yes: bool) -> None:
            page.evaluate(
                """(yes) => { Object.defineProperty(document, "hidden", { value: !yes, configurable: true });
                document.dispatchEvent(new Event("visibilitychange")); }""",
                yes,
            )

        def asks(seconds: float = 3.0) -> bool:
            asked.clear()
            page.wait_for_timeout(1000 * seconds)
            return bool(asked)

        until(asks, "the page reads the run each second")
        shown(False)
        page.wait_for_timeout(1500)  # what was asked before that is answered
        assert not asks(), asked
        shown(True)
        until(asks, "the page reads the run again")
