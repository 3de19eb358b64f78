"""The script's editor in a real browser; the server is killed while the script is edited.

tests/campaigns/page/test_configure.py goes on to a finished run, in two windows.
"""

import json
import re

from ui_helpers import serving, squares
from ui_page import choose_tiny, drop, field, open_page, until

MARK = "echo a line of mine"


def insert_line(page, text: str) -> None:
    """Add a line below the first one."""
    page.locator("#script .cm-content").click()
    page.keyboard.press("Control+Home")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(text)


def test_an_edited_script_of_which_no_line_is_lost(tab, data, tmp_path):
    with serving(data) as server:
        open_page(tab, server)
        field(tab, "name").fill("walk")
        field(tab, "trigger").fill("ohwx")
        choose_tiny(tab)
        drop(tab, *squares(tmp_path / "in", 2), count=2)
        tab.locator("#script-fold button.label-wrap").first.click()
        tab.locator("#edit-script").click()
        tab.locator("#script .cm-content[contenteditable=true]").wait_for()
        insert_line(tab, "if true; then")
        tab.get_by_test_id("script-findings").get_by_text("bash:").wait_for()
        tab.locator("#start").click()
        tab.locator(".hp-problem").get_by_text("The script: Line", exact=False).wait_for()
        assert not list((data / "outputs").glob("*/run.toml")), "Start refuses it"
        insert_line(tab, MARK)
        server.stop(hard=True)  # before the page has sent it
    with serving(data, port=server.port):

        def stored() -> str:
            (path,) = data.glob("datasets/.drafts/*/script.json")
            return json.loads(path.read_text())["script"]

        until(lambda: MARK in stored(), "the line that was typed while the server was away")
        tab.reload()
        tab.locator("body.hp-open").wait_for()
        tab.get_by_role("button", name=re.compile("^The script")).click()
        tab.locator("#script .cm-content").get_by_text(MARK).wait_for()
        insert_line(tab, "echo kept until the second press")
        tab.locator("#discard-script").click()
        tab.get_by_role("button", name="Discard your script? Press again").wait_for()
        until(lambda: "kept until the second press" in stored(), "a line typed just before the first press")
        tab.get_by_role("button", name="Use the generated script").click()  # what was stored asks again
        tab.get_by_role("button", name="Discard your script? Press again").click()
        tab.locator("#edit-script").wait_for()
        assert not list(data.glob("datasets/.drafts/*/script.json"))
        assert MARK not in tab.locator("#script .cm-content").inner_text()
        tab.errors.clear()  # of the time without a server
