"""The list of runs beside the run: with many runs and a queue, on low and wide windows, everything in it stays in sight."""

import pytest
from ui_helpers import serving, write_run
from ui_page import a_tab, faint_texts

from monitor import run_queue
from runs import slug

NUMBER, WAITING = 30, ("cat 03", "cat 04")
OLDEST = "cat 00"


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A page with 30 runs, of which two wait in the queue."""
    data = tmp_path_factory.mktemp("many") / "data"
    for number in range(NUMBER):
        write_run(data, f"cat {number:02}", state="completed", step=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANGPROOF_DATA", str(data))
        for name in WAITING:
            run_queue.add(data / "outputs" / slug(name))
    with serving(data) as server:
        yield server


def box(page, selector: str) -> dict[str, float]:
    """Where an element is, in pixels."""
    place = page.locator(selector).first.bounding_box()
    assert place, f"{selector} is not shown"
    return place


@pytest.mark.parametrize("width", [1024, 1440, 1920])
def test_search_queue_and_list_are_all_there_with_30_runs(browser, many, width):
    with a_tab(browser, width=width, height=768) as page:
        page.goto(f"{many.url}?run={slug(OLDEST)}")
        page.locator("body.hp-open").wait_for()
        page.locator(f".hp-here[data-run='{slug(OLDEST)}']").wait_for(state="attached")
        side = box(page, ".hp-side")
        for part in ("#run-search textarea, #run-search input", "#run-queue", ".hp-run"):
            place = box(page, part)
            assert place["height"] > 20 and place["width"] > 150, (part, place)
            assert place["x"] >= side["x"] - 1 and place["x"] + place["width"] <= side["x"] + side["width"] + 1, part
        assert page.locator("#run-list .hp-run").count() == NUMBER
        assert box(page, "#run-search textarea, #run-search input")["y"] < 768
        last = page.locator("#run-list .hp-run").last
        last.scroll_into_view_if_needed()
        place = last.bounding_box()
        assert place and side["y"] - 1 <= place["y"] and place["y"] + place["height"] <= 769
        # The run's own header is beside the list, whichever run it is.
        page.evaluate("window.scrollTo(0, 0)")
        assert page.locator(".hp-head").first.is_visible() and box(page, ".hp-head")["y"] < 768


def test_delete_does_not_look_like_cancel(browser, many):
    with a_tab(browser) as page:
        page.goto(f"{many.url}?run={slug(OLDEST)}")
        page.locator("body.hp-open").wait_for()
        page.locator("#delete").click()
        page.locator("#delete-ok").wait_for()
        colours = "selector => getComputedStyle(document.querySelector(selector)).backgroundColor"
        assert page.evaluate(colours, "#delete-ok") != page.evaluate(colours, "#delete-no")
        assert faint_texts(page) == []
