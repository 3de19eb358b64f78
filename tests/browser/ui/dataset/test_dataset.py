"""Step 2 for large data sets in a real browser: a folder on the server, bulk edits, subsets, selection; and a killed server."""

import re
import signal
import threading

import pytest
from axe_playwright_python.sync_playwright import Axe
from draft_helpers import photo, photo_folder
from ui_helpers import browsing, free_port, serving
from ui_page import PATIENCE_S, a_tab, caption, captions, open_page, saved, until

from ui.dataset import draft, draft_store

NUMBER = 90


@pytest.fixture
def server(tmp_path):
    """A server that a test kills and starts again at the same address."""
    with serving(tmp_path / "data", port=free_port()) as own:
        yield own


def again(server):
    """The server after SIGKILL, at the same address with the same data."""
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(60)
    return serving(server.data, port=server.port)


def count_of(page) -> int:
    found = re.match(r"([\d,]+) image", page.get_by_test_id("image-count").inner_text())
    return int(found[1].replace(",", "")) if found else 0


def shows(page, text: str) -> None:
    page.get_by_test_id("image-count").get_by_text(text).wait_for()


@pytest.mark.long
def test_a_killed_server_loses_nothing_of_a_folder_import_and_of_a_bulk_edit(server, tmp_path, monkeypatch):
    root = photo_folder(tmp_path / "photos", NUMBER, "photo {}, old tag, sky")
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    with browsing() as browser, a_tab(browser) as tab:
        open_page(tab, server)
        tab.get_by_role("button", name="Name a folder on the server").click()
        tab.get_by_label("Folder on the server").fill("/no/such/folder")
        tab.keyboard.press("Enter")
        tab.get_by_text("there is no such folder on the server; check the path").wait_for()
        tab.get_by_label("Folder on the server").fill(str(root))
        tab.keyboard.press("Enter")
        tab.get_by_test_id("importing").wait_for()
        until(lambda: count_of(tab) > 0, "the first images are shown while the others are imported")
        draft_id = tab.evaluate("hangproof.draft()")
        with again(server) as second:
            tab.goto("about:blank")
            open_page(tab, second)
            shows(tab, f"{NUMBER} images")
            tab.get_by_text(f"images added from {root}").wait_for()
            assert tab.get_by_test_id("importing").is_hidden()
            assert sorted(i.caption for i in draft.items(draft_id)) == sorted(f"photo {n}, old tag, sky" for n in range(NUMBER))  # fmt: skip

            # A bulk edit is stored as a whole or not at all, whenever the server is killed.
            tab.get_by_role("button", name="Edit captions in bulk").click()
            tab.get_by_label("Find in captions").fill("old tag")
            tab.get_by_label("Replace with").fill("new tag")
            change = tab.get_by_role("button", name=f"Change {NUMBER} captions")
            change.wait_for()
            threading.Timer(0.01, second.process.send_signal, [signal.SIGKILL]).start()
            change.click()
            second.process.wait(60)
            with serving(server.data, port=server.port) as third:
                open_page(tab, third)
                shows(tab, f"{NUMBER} images")
                found = {"old tag" in item.caption for item in draft.items(draft_id)}
                assert len(found) == 1, "all captions or none"
                if found == {True}:
                    tab.get_by_role("button", name="Edit captions in bulk").click()
                    tab.get_by_label("Find in captions").fill("old tag")
                    tab.get_by_label("Replace with").fill("new tag")
                    change.click()
                    tab.get_by_text(f"{NUMBER} captions changed.").wait_for()
                assert all("new tag" in text for text in captions(tab).values())
                with again(third) as fourth:  # what was confirmed is there after one more kill, with its undo
                    tab.goto("about:blank")
                    open_page(tab, fourth)
                    shows(tab, f"{NUMBER} images")
                    assert all("new tag" in text for text in captions(tab).values())
                    tab.get_by_role("button", name=f"Undo: replacement in {NUMBER} captions").click()
                    until(lambda: all("old tag" in text for text in captions(tab).values()), "undone")
                    tab.get_by_role("button", name="Undo: adding of").click()
                    shows(tab, "0 images")


def filled(draft_id: str, number: int) -> None:
    """A draft of small images that exist."""
    files = [(photo(draft_store.uploads_dir() / "x" / f"{n:03}.png", n, size=(300, 300)), f"{n:03}.png") for n in range(number)]  # fmt: skip
    draft.add(draft_id, files)
    draft.set_captions(
        draft_id, {item.id: f"photo, tag {n % 3}, n{n}" for n, item in enumerate(draft.items(draft_id))}, "x"
    )


def test_many_images_are_found_selected_edited_and_moved_in_two_browsers_at_once(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    mine = draft.new_id()
    filled(mine, 40)
    with browsing() as browser, a_tab(browser) as tab, a_tab(browser, width=390) as other:
        for page in (tab, other):
            page.add_init_script(f"localStorage['hangproof-draft-id'] ||= '{mine}'")
            open_page(page, server)
            shows(page, "40 images")

        # Search, and select a range over two pages with the keyboard.
        tab.get_by_label("Search by").select_option("Has the tag")
        tab.get_by_label("Search captions").fill("Tag 1")
        shows(tab, "13 shown")
        tab.get_by_label("Select 001.png").focus()
        tab.keyboard.press("Space")
        tab.get_by_role("button", name="Next ›").click()
        tab.get_by_text("Page 2 of 2").wait_for()
        tab.get_by_label("Select 037.png").focus()
        tab.keyboard.press("Shift+Space")
        tab.get_by_text("13 selected", exact=True).wait_for()
        tab.get_by_role("button", name="Invert selection").click()
        until(lambda: not tab.locator(".hp-selection").is_visible(), "none of those that are shown")
        tab.get_by_role("button", name="Select all 13").click()
        tab.get_by_text("13 selected", exact=True).wait_for()

        # Move them into a new subset, while the other browser types a caption of one of them.
        tab.get_by_role("button", name="Subsets", exact=True).click()
        tab.get_by_label("Move to the subset").fill("first")
        tab.locator("#images").get_by_label("Repeats", exact=True).fill("5")
        caption(other, "001.png").fill("typed in the other browser")
        tab.get_by_role("button", name="Move 13 selected images").click()
        tab.get_by_text("13 images moved.").wait_for()
        saved(other, "001.png")
        assert {name: number for name, number in draft.counts(mine).items()} == {"": 27, "5_first": 13}
        row = tab.locator(".hp-subsets .hp-bulk-row").filter(has=tab.get_by_label("Name of the subset first"))
        row.get_by_label("Repeats of the subset first").fill("7")
        row.get_by_label("Name of the subset first").fill("second")
        tab.keyboard.press("Enter")
        tab.get_by_text("The subset second is saved.").wait_for()
        assert draft.repeats(mine) == {"7_second": 7}
        tab.get_by_label("Subset", exact=True).select_option("second (13)")
        tab.get_by_label("Search captions").fill("")
        shows(tab, "13 shown")
        assert "typed in the other browser" in [item.caption for item in draft.items(mine)]

        # A tag is removed from all images; the other browser undoes it.
        tab.get_by_role("button", name="Tags", exact=True).click()
        tab.get_by_label("Find a tag").fill("photo")
        tab.get_by_role("button", name="Remove the tag photo").click()
        tab.locator("#images").get_by_label("Images", exact=True).select_option("All images")
        tab.get_by_text("39 of 40 captions change.").wait_for()
        for view in ("light", "dark"):
            tab.emulate_media(color_scheme=view)
            tab.wait_for_timeout(1000)  # colours change gradually
            found = Axe().run(tab, "#images", {"resultTypes": ["violations"]}).response["violations"]
            assert not [one for one in found if one["impact"] in ("serious", "critical")], found
        tab.get_by_role("button", name="Change 39 captions").click()
        tab.get_by_text("39 captions changed.").wait_for()
        other.reload()
        shows(other, "40 images")
        other.get_by_role("button", name="Undo: removal of tags from 39 captions").click()
        other.get_by_text("Undone: removal of tags").wait_for()
        assert sum("photo" in item.caption for item in draft.items(mine)) == 39

        # An upload that takes long is cancelled.
        other.route("**/gradio_api/upload*", lambda route: None)  # never answered
        other.get_by_test_id("image-picker").set_input_files(
            [str(photo(tmp_path / f"{n}.png", 100 + n)) for n in range(3)]
        )
        other.get_by_role("button", name="Cancel the upload").click()
        other.get_by_text("Upload cancelled. 3 files not uploaded").wait_for()
        assert other.get_by_role("button", name="Cancel the upload").is_hidden() and len(draft.items(mine)) == 40

        # A hostile pattern ends with a message, and the server goes on.
        tab.reload()
        shows(tab, "40 images")
        caption(tab, "000.png").fill("a" * 60 + "!")
        saved(tab, "000.png")
        tab.get_by_role("button", name="Edit captions in bulk").click()
        tab.get_by_text("Regular expression").click()
        tab.get_by_label("Find in captions").fill("(a|aa)+$")
        tab.get_by_text("this regular expression needs more than 3 s; simplify it").wait_for(timeout=PATIENCE_S * 1000)
        assert tab.get_by_role("button", name="Change captions").is_disabled()
