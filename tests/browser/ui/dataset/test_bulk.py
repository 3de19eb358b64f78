"""Step 2 for large data sets in a real browser: search, selection, subsets, edited captions, a cancelled upload, and
a folder of the server."""

from draft_helpers import photo
from ui_page import hold, open_page, press, unfold, until

from ui.dataset import draft, draft_store


def filled(draft_id: str, number: int) -> None:
    """A draft of small images that exist."""
    uploads = draft_store.uploads_dir() / "x"
    draft.add(draft_id, [(photo(uploads / f"{n:03}.png", n, size=(300, 300)), f"{n:03}.png") for n in range(number)])
    texts = {item.id: f"photo, tag {n % 3}, n{n}" for n, item in enumerate(draft.items(draft_id))}
    draft.change_images(draft_id, texts, lambda key, entry: draft.captioned(entry, texts[key]), "x")


def test_many_images_are_found_selected_edited_and_moved(tab, server, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    mine = draft.new_id()
    filled(mine, 40)
    tab.add_init_script(f"localStorage['hangproof-draft-id'] ||= '{mine}'")
    open_page(tab, server)

    def shows(text: str) -> None:
        tab.get_by_test_id("image-count").get_by_text(text).wait_for()

    shows("40 images")
    fold = tab.locator("#bulk-fold")
    unfold(fold.locator("button.label-wrap").first)
    # Search, and select a range over two pages with the keyboard.
    tab.get_by_label("Search captions").fill("Tag 1,")
    shows("13 shown")
    tab.get_by_label("Select 001.png").press("Space")
    press(tab.get_by_role("button", name="Next ›"), tab.get_by_text("Page 2 of 2"))
    tab.get_by_label("Select 037.png").press("Shift+Space")
    tab.get_by_text("13 selected", exact=True).wait_for()
    tab.get_by_role("button", name="Invert selection").click()
    tab.locator(".hp-selection").wait_for(state="hidden")  # none of those that are shown
    press(tab.get_by_role("button", name="Select all 13"), tab.get_by_text("13 selected", exact=True))

    # Move them into a new subset.
    fold.get_by_role("tab", name="Subsets").click()
    fold.get_by_label("Move the selected images to the subset").fill("first")
    fold.get_by_label("Its repeats").fill("5")
    press(tab.locator("#bulk-move"), tab.get_by_text("13 images moved."))
    assert draft.counts(mine) == {"": 27, "5_first": 13}
    fold.get_by_label("Subset", exact=True).click()
    tab.get_by_role("option", name="first × 5 (13)").click()
    until(lambda: fold.get_by_label("Name of the subset").input_value() == "first", "the subset's name")
    tab.locator("#images").get_by_label("Subset", exact=True).select_option("first (13)")
    tab.get_by_label("Search captions").fill("")
    shows("13 shown")

    # A tag is removed from all images.
    fold.get_by_role("tab", name="Captions").click()
    fold.get_by_label("Edit", exact=True).click()
    tab.get_by_role("option", name="Remove tags").click()
    # The preview for the selected images comes late and does not replace that for all.
    apply = tab.locator("#bulk-apply")
    with hold(tab, '"photo"', "**/queue/join*", first=True) as asks:
        fold.get_by_label("Tags, separated by commas").fill("photo")
        asks()
        fold.get_by_label("Only the selected images").uncheck()
    apply.get_by_text("Change 40 captions").wait_for()
    tab.wait_for_timeout(500)
    assert apply.inner_text() == "Change 40 captions"
    press(apply, tab.get_by_text("40 captions changed."))
    assert sum("photo" in item.caption for item in draft.items(mine)) == 0
    # A second edit of as many captions has the same label in the history; the preview follows it, too.
    fold.get_by_label("Tags, separated by commas").fill("tag 0, tag 1, tag 2")
    press(apply.get_by_text("Change 40 captions"), apply.get_by_text("Change captions", exact=True))
    label = fold.locator("button.label-wrap").first  # its content is made anew
    until(lambda: not label.evaluate("(label) => label.matches('.open')") or label.click(), "the fold is closed")
    unfold(label)
    apply.wait_for()

    # An upload that takes long is cancelled.
    tab.route("**/gradio_api/upload*", lambda route: None)  # never answered
    files = [str(photo(tmp_path / f"{n}.png", 100 + n)) for n in range(3)]
    tab.get_by_test_id("image-picker").set_input_files(files)
    cancel = tab.get_by_role("button", name="Cancel the upload")
    cancel.wait_for()
    tab.locator(".hp-toolbar").get_by_role("button", name="Undo: removal of tags").click()
    tab.get_by_text("Images are being uploaded. Undo and redo when that has ended").wait_for()
    assert not any("photo" in item.caption for item in draft.items(mine))
    press(cancel, tab.get_by_text("Upload cancelled. 3 files not uploaded"))
    assert len(draft.items(mine)) == 40

    # A folder on the server is imported.
    folder = photo(tmp_path / "far" / "sky.png", 200).parent
    tab.get_by_role("button", name="Add a folder on the server").click()
    tab.get_by_label("Folder on the server").fill(str(folder))
    tab.keyboard.press("Enter")
    tab.get_by_text(f"added from {folder}").wait_for()
    assert len(draft.items(mine)) == 41
