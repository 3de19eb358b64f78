"""The log on the page: its end, colours, a search, and that nothing in a log is executed."""

from ui_helpers import write_run
from ui_page import assert_accessible, field, show_run, until

HEADER = "=== 2026-11-22T00:{:02d}:00.000Z attempt {}: train.sh, from the start\n"
MARKUP = "<img src=x onerror=\"document.title='run'\">\n"


def test_the_log_follows_its_end_and_is_searched(page, server):
    folder = write_run(server.data, "a log", state="stopped")
    path = folder / "training.log"
    first = HEADER.format(1, 1) + "".join(f"line {n}\n" for n in range(800)) + MARKUP
    second = HEADER.format(20, 2) + "\x1b[31mRuntimeError: a red one\x1b[0m\n"
    path.write_text(first + second + "".join(f"more {n}\n" for n in range(4000)))
    show_run(page, server, folder.name)
    page.locator("#log-fold button.label-wrap").click()
    log = page.get_by_role("region", name="Training log")
    log.get_by_text("more 3999").wait_for()
    follow = page.get_by_label("Follow the end")
    assert follow.is_checked()

    def add(text: str) -> None:
        with path.open("a") as file:
            file.write(f"{text}\n")

    add("a new line")
    log.get_by_text("a new line").wait_for()
    log.evaluate("(e) => { e.scrollTop = -600; }")
    until(lambda: not follow.is_checked(), "scrolling up stops following")
    search, status = field(page, "log-query"), page.locator("#log-status")
    search.fill("line 79")
    status.get_by_text("11 lines found").wait_for()
    log.get_by_text("line 795").wait_for()
    add("an unseen line")
    search.fill("onerror")
    status.get_by_text("1 line found").wait_for()
    log.get_by_text("<img src=x onerror").wait_for()  # as text
    assert log.locator("img").count() == 0 and page.title() == "Hangproof"
    assert log.get_by_text("an unseen line").count() == 0
    search.fill("")
    log.get_by_text("an unseen line").wait_for()
    search.fill("error")
    log.locator(".hp-sgr-c1").get_by_text("RuntimeError: a red one").wait_for()
    follow.check()
    log.get_by_text("an unseen line").wait_for()
    assert_accessible(page, "#log-fold")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download (").click()
    assert download.value.suggested_filename == "training.log"
    assert download.value.path().read_text().endswith("an unseen line\n")
