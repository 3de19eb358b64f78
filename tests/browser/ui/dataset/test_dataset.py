"""Step 2 for large data sets in a real browser: a folder on the server, bulk edits, subsets, selection; and a killed server."""

from draft_helpers import photo
from ui_page import PATIENCE_S, a_tab, caption, open_page, saved, serious, until

from ui.dataset import draft, draft_store


def shows(page, text: str) -> None:
    page.get_by_test_id("image-count").get_by_text(text).wait_for()


def filled(draft_id: str, number: int) -> None:
    """A draft of small images that exist."""
    files = [(photo(draft_store.uploads_dir() / "x" / f"{n:03}.png", n, size=(300, 300)), f"{n:03}.png") for n in range(number)]  # fmt: skip
    draft.add(draft_id, files)
    draft.set_captions(
        draft_id, {item.id: f"photo, tag {n % 3}, n{n}" for n, item in enumerate(draft.items(draft_id))}, "x"
    )


def test_many_images_are_found_selected_edited_and_moved_in_two_browsers_at_once(
    browser, server, tmp_path, monkeypatch
):
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    mine = draft.new_id()
    filled(mine, 40)
    with a_tab(browser) as tab, a_tab(browser, width=390) as other:
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
            assert serious(tab, "#images") == []
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
