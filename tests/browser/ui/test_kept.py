"""Nothing that was typed is lost, and nothing is shown as saved or uploaded that is not, while the server is killed.

The campaign: PAGE_KILLS=20 .venv/bin/python -m pytest tests/browser/ui/test_kept.py
"""

import os
import random
import threading

import pytest
from ui_helpers import photos, serving
from ui_page import a_tab, caption, captions, drop, field, gpu_fold, nothing_is_kept, open_page, serving_again, until

from ui.dataset import draft
from ui.new import script_editor

# Each text that appears beside a card as "saved" is reported with the card's image and caption.
SAVED = """() => {
  const watch = new MutationObserver((changes) => {
    for (const { target } of changes) {
      const mark = target.nodeType === 1 ? target : target.parentElement;
      const card = mark?.closest?.(".hp-card");
      if (!card || !mark.closest(".hp-saved") || mark.textContent !== "saved") continue;
      window.reportSaved([card.dataset.file, card.querySelector("textarea").value]);
    }
  });
  addEventListener("DOMContentLoaded", () => watch.observe(document, { subtree: true, childList: true, characterData: true }));
}"""


@pytest.fixture
def tab(browser):
    with a_tab(browser) as page:
        yield page
        page.errors.clear()  # requests to the dead server failed


def mark(page, file: str):
    return page.locator(f".hp-card[data-file='{file}'] .hp-saved")


def banner(page):
    return page.get_by_test_id("unsaved-banner")


def stored_captions(draft_id: str) -> dict[str, str]:
    return {item.file: item.caption for item in draft.items(draft_id)}


@pytest.mark.parametrize("kill", range(int(os.environ.get("PAGE_KILLS", "1"))))
def test_what_is_typed_while_the_server_is_killed_is_not_called_saved_and_arrives_later(tab, data, kill):
    """In two tabs, of which one is closed before the server is back."""
    draw, said = random.Random(kill), list[tuple[str, str]]()
    tab.context.expose_binding("reportSaved", lambda _, found: said.append(tuple(found)))
    tab.context.add_init_script(f"({SAVED})()")
    with serving(data) as server:
        open_page(tab, server)
        field(tab, "name").fill("before")
        tab.get_by_text("The script", exact=True).click()
        tab.locator("#edit-script").click()
        tab.locator("#script .cm-content[contenteditable=true]").click()
        drop(tab, *photos("coffee.png", "rocket.jpg"), count=2)
        second = tab.context.new_page()
        open_page(second, server)
        caption(second, "rocket.jpg").wait_for()
        pages = {"coffee.png": tab, "rocket.jpg": second}
        gpu_fold(tab)
        draft_id = second.evaluate("hangproof.draft()")
        # One caption after another, until the server is dead and once more. The script waits for a pause.
        (stop := threading.Timer(draw.uniform(0.3, 2), server.stop, (True,))).start()
        tab.locator("#script .cm-content").press("Control+End")
        tab.keyboard.insert_text("# mine\n")
        ended, number, typed = False, 0, {}
        while not ended:
            ended, number = not stop.is_alive(), number + 1
            for file, page in pages.items():
                typed[file] = f"{file} {number}"
                caption(page, file).fill(typed[file])
                page.wait_for_timeout(draw.uniform(0, 200))
        disk = {item.file: item.caption for item in draft.items(draft_id)}
        for file, text in said:  # it is on disk, or a text typed later is
            assert int(disk[file].split()[-1]) >= int(text.split()[-1]), f"{text} was shown as saved"
        for file, page in pages.items():
            mark(page, file).get_by_text("not saved").wait_for()
        field(tab, "name").fill("after")
        field(tab, "repeats").fill("7")  # Gradio has noticed the dead server and sends no more events
        assert not tab.locator("#tier input[value='16G']").is_checked()
        tab.locator("#tier input[value='16G']").click()
        banner(tab).get_by_text("Your changes are kept in this browser").wait_for()
        second.get_by_label("Remove rocket.jpg").click()
        second.locator(".hp-notes").get_by_text("Nothing was changed").wait_for()
        assert set(captions(second)) == {"coffee.png", "rocket.jpg"}
        second.get_by_test_id("image-picker").set_input_files([str(path) for path in photos("chelsea.png")])
        second.locator(".hp-notes").get_by_text("1 of 1 files were not uploaded. Drop them again.").wait_for()
        kept = {"name": "after", "repeats": 7, "tier": "16G"}
        until(lambda: tab.evaluate("Object.fromEntries(hangproof.unsaved('field'))") == kept, "three fields are kept")
        tab.close()
    with serving_again([second], data, server.port):
        until(lambda: {one.file: one.caption for one in draft.items(draft_id)} == typed, "each text is with its image")
        until(lambda: nothing_is_kept(second), "the server has everything")
        banner(second).wait_for(state="hidden")
        until(lambda: captions(second) == typed, "the page shows what is stored")
        until(lambda: field(second, "name").input_value() == "after", "the page shows the name")
        until(lambda: field(second, "repeats").input_value() == "7", "the page shows the repeats")
        until(second.get_by_text("GPU memory and trainer: 16 GB").is_visible, "the page shows the tier")
        stored = draft.form(draft_id)
        assert [stored[key] for key in kept] == [*kept.values()]
        assert script_editor.stored(draft_id)["script"].endswith("# mine\n")


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
        tab.locator(".hp-notes").get_by_text("Your login has ended. 1 of 1 files were not uploaded").wait_for()
        field(tab, "trigger").fill("tok")
        tab.get_by_label("Remove coffee.png").click()
        tab.locator(".hp-notes").get_by_text("Your login has ended. Nothing was changed").wait_for()
        banner(tab).get_by_role("button", name="Log in again").click()
        log_in(tab)
        caption(tab, "coffee.png").wait_for()
        until(lambda: nothing_is_kept(tab), "the server has everything")
        assert stored_captions(tab.evaluate("hangproof.draft()")) == {"coffee.png": "a cup"}
        until(lambda: field(tab, "trigger").input_value() == "tok", "the page shows the trigger word")
