"""Nothing that was typed or dropped is lost, and nothing is shown as saved that is not, while the server is killed.

tests/campaigns/page/test_kept.py kills it at random moments.
"""

import itertools
import threading

import pytest
from ui_helpers import photos, serving
from ui_page import PATIENCE_S, a_tab, caption, captions, drop, field, nothing_is_kept, open_page, until

from ui.dataset import draft


@pytest.fixture
def tab(browser):
    with a_tab(browser) as page:
        yield page
        page.errors.clear()  # requests to the dead server failed


def mark(page, file: str):
    return page.locator(f".hp-card[data-file='{file}'] .hp-saved")


def banner(page):
    return page.get_by_test_id("unsaved-banner")


def stored_captions(page) -> dict[str, str]:
    return {item.file: item.caption for item in draft.items(page.evaluate("hangproof.draft()"))}


def killed_while_typing(server, pages: dict) -> dict[str, str]:
    """Type one caption after another, by file in its page, until the server is dead and once more. Returns those typed last."""
    dead = threading.Event()
    threading.Timer(0.7, lambda: (server.stop(hard=True), dead.set())).start()
    typed: dict[str, str] = {}
    for number in itertools.count():
        ended = dead.is_set()
        for file, page in pages.items():
            typed[file] = f"{file} {number}"
            caption(page, file).fill(typed[file])
        if ended:
            return typed


def test_what_is_typed_and_dropped_while_the_server_is_killed_is_not_called_saved_and_arrives_later(tab, data):
    with serving(data) as server:
        open_page(tab, server)
        drop(tab, *photos("coffee.png", "rocket.jpg"), count=2)
        second = tab.context.new_page()
        second.set_default_timeout(PATIENCE_S * 1000)
        open_page(second, server)
        caption(second, "rocket.jpg").wait_for()
        pages = {"coffee.png": tab, "rocket.jpg": second}
        typed = killed_while_typing(server, pages)
        field(tab, "name").fill("after")
        field(tab, "repeats").fill("7")  # Gradio has noticed the dead server and sends no more events
        tab.get_by_label("16 GB").click()
        for file, page in pages.items():
            mark(page, file).get_by_text("not saved").wait_for()
        banner(tab).get_by_text("Not connected to Hangproof. Your changes are kept in this browser").wait_for()
        tab.get_by_label("Remove rocket.jpg").click()
        tab.locator(".hp-notes").get_by_text("Nothing was changed").wait_for()
        assert set(captions(tab)) == {"coffee.png", "rocket.jpg"}
        tab.get_by_test_id("image-picker").set_input_files([str(path) for path in photos("chelsea.png")])
        tab.locator(".hp-notes").get_by_text("1 file is kept in this browser").wait_for()
    expected = {**typed, "chelsea.png": ""}
    with serving(data, port=server.port) as server:
        for page in pages.values():
            until(lambda page=page: nothing_is_kept(page), "the server has everything")
            banner(page).wait_for(state="hidden")
        until(lambda: stored_captions(tab) == expected, "each text is stored with its image")
        until(lambda: captions(tab) == captions(second) == expected, "both tabs show what is stored")
        stored = draft.form(tab.evaluate("hangproof.draft()"))
        assert [stored[key] for key in ("name", "repeats", "tier")] == ["after", 7, "16G"]
        until(lambda: field(tab, "name").input_value() == "after", "the page shows the name")
        until(lambda: field(tab, "repeats").input_value() == "7", "the page shows the repeats")

        # What is typed outlives the tab, too.
        tab.close()
        server.stop(hard=True)
        caption(second, "coffee.png").fill("a cup")
        field(second, "name").fill("kept")
        field(second, "trigger").fill("tok")
        mark(second, "coffee.png").get_by_text("not saved").wait_for()
        third = second.context.new_page()
        third.set_default_timeout(PATIENCE_S * 1000)
        second.close()
    with serving(data, port=server.port) as server:
        open_page(third, server)
        until(lambda: [field(third, key).input_value() for key in ("name", "trigger")] == ["kept", "tok"], "the fields")
        expected["coffee.png"] = "a cup"
        until(lambda: captions(third) == expected, "the captions")
        until(lambda: nothing_is_kept(third), "the server has everything")
        assert stored_captions(third) == expected
        stored = draft.form(third.evaluate("hangproof.draft()"))
        assert (stored["name"], stored["trigger"]) == ("kept", "tok")


def log_in(page) -> None:
    page.locator("input[type=text], input[name=user], input[name=username]").first.fill("me")
    page.locator("input[type=password]").fill("secret")
    page.locator("button").first.click()
    page.locator("body.hp-open").wait_for()


def test_an_ended_login_saves_nothing_and_loses_nothing(tab, data):
    login = ("--auth", "me:secret")
    with serving(data, *login) as server:
        tab.goto(server.url)
        log_in(tab)
        drop(tab, *photos("coffee.png"), count=1)
        tab.wait_for_function("() => [...document.images].every((one) => one.complete && one.naturalWidth)")
        tab.context.clear_cookies()
        caption(tab, "coffee.png").fill("a cup")
        mark(tab, "coffee.png").get_by_text("not saved").wait_for()
        banner(tab).get_by_text("Your login has ended").wait_for()
        tab.get_by_test_id("image-picker").set_input_files([str(path) for path in photos("rocket.jpg")])
        tab.locator(".hp-notes").get_by_text("1 file is kept in this browser").wait_for()
        field(tab, "trigger").fill("tok")
        tab.get_by_label("Remove coffee.png").click()
        tab.locator(".hp-notes").get_by_text("Your login has ended. Nothing was changed").wait_for()
        banner(tab).get_by_role("button", name="Log in again").click()
        log_in(tab)
        tab.get_by_test_id("image-count").get_by_text("2 images").wait_for()
        until(lambda: nothing_is_kept(tab), "the server has everything")
        assert stored_captions(tab) == {"coffee.png": "a cup", "rocket.jpg": ""}
        assert field(tab, "trigger").input_value() == "tok"
