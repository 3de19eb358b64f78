"""A folder on the server is imported and edited in bulk while the page's server is killed."""

import re
import signal
import threading

import pytest
from draft_helpers import photo_folder
from ui_helpers import free_port, serving
from ui_page import a_tab, captions, open_page, until

from ui.dataset import draft

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


def test_a_killed_server_loses_nothing_of_a_folder_import_and_of_a_bulk_edit(browser, server, tmp_path, monkeypatch):
    root = photo_folder(tmp_path / "photos", NUMBER, "photo {}, old tag, sky")
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    with a_tab(browser) as tab:
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
