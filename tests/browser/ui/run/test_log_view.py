"""The log on the page: its end, colours, search with a time limit, places, and that nothing in a log is executed."""

from ui_helpers import write_incident, write_run
from ui_page import show_run, until

HEADER = "=== 2026-11-22T00:{:02d}:00.000Z attempt {}: train.sh, from the start\n"
MARKUP = "<img src=x onerror=\"document.title='run'\">\n"


def test_the_log_follows_searches_and_jumps(page, server):
    folder = write_run(server.data, "a log", state="stopped")
    path = folder / "training.log"
    first = HEADER.format(1, 1) + "".join(f"line {n}\n" for n in range(800)) + MARKUP
    second = HEADER.format(20, 2) + "\x1b[31mRuntimeError: a red one\x1b[0m\n"
    path.write_text(first + second + "".join(f"more {n}\n" for n in range(4000)))
    write_incident(folder, "0001", attempt=1, title="It hung")
    show_run(page, server, folder.name)
    log = page.get_by_role("region", name="Training log")
    log.get_by_text("more 3999").wait_for()
    log.scroll_into_view_if_needed()  # it is read only while it is in view
    follow = page.get_by_role("button", name="Follow")
    assert follow.get_attribute("aria-pressed") == "true"

    def add(text: str) -> None:
        with path.open("a") as file:
            file.write(f"{text}\n")

    add("a new line")
    log.get_by_text("a new line").wait_for()
    log.evaluate("(e) => { e.scrollTop = -600; }")
    until(lambda: follow.get_attribute("aria-pressed") == "false", "scrolling up stops following")
    add("an unseen line")
    for _ in range(2):  # ticks of the page
        with page.expect_response("**/run/predict*"):
            pass
    assert log.get_by_text("an unseen line").count() == 0
    follow.click()
    log.get_by_text("an unseen line").wait_for()
    search = page.get_by_role("searchbox", name="Search the log")
    status = page.locator(".hp-log-status")
    search.fill("line 79")
    status.get_by_text("11 lines found").wait_for()
    log.get_by_text("line 795").focus()
    page.keyboard.press("Enter")
    log.locator(".hp-log-here").get_by_text("line 795").wait_for()
    page.get_by_text("Regex").click()
    search.fill("line 1[23]5$")
    status.get_by_text("2 lines found").wait_for()
    search.fill("(")
    status.get_by_text("Not a regular expression").wait_for()
    search.fill("")
    page.get_by_label("Lines", exact=True).select_option("error")
    log.locator(".hp-sgr-c1").get_by_text("RuntimeError: a red one").wait_for()
    page.get_by_label("Jump to an incident").select_option("0001")
    log.locator(".hp-log-here").get_by_text("<img src=x onerror").wait_for()  # as text
    assert log.locator("img").count() == 0 and page.title() == "Hangproof"
    follow.click()
    log.get_by_text("an unseen line").wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download (").click()
    assert download.value.suggested_filename == "training.log"
    assert download.value.path().read_text().endswith("an unseen line\n")

    # By keyboard.
    page.locator("#delete").focus()
    here = "(e) => e === document.activeElement"
    for _ in range(30):
        page.keyboard.press("Tab")
        if log.evaluate(here):
            break
    assert log.evaluate(here) and log.evaluate("(e) => getComputedStyle(e).outlineStyle") != "none"
    before = log.evaluate("(e) => e.scrollTop")
    page.keyboard.press("PageUp")
    until(lambda: log.evaluate("(e) => e.scrollTop") < before, "the log scrolls")
