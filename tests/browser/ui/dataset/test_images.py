"""Step 2 in a real browser: folders, undo, order, warnings, filters, and the same draft in two tabs and two browsers."""

import re
import zipfile
from pathlib import Path

import pytest
from PIL import Image
from ui_helpers import photos
from ui_page import a_tab, caption, captions, drop, field, has_focus, open_page, saved, until

from ui.dataset import draft


def picture(path: Path, color: tuple[int, int, int], side: int = 256) -> Path:
    """An image of one colour with a diagonal line, so that no two colours are nearly identical."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (side, side), color)
    for n in range(side):
        for width in range(12):
            image.putpixel(
                (n, (n * (1 + color[0] % 5) + width + color[1]) % side), (255 - color[0], color[2], color[1])
            )
    image.save(path)
    return path


def os_drop(page, *paths: Path, on: str = ".hp-drop") -> None:
    """Drop files and folders from the system onto the middle of an element."""
    page.locator(on).scroll_into_view_if_needed()
    box = page.locator(on).bounding_box()
    where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, **where, "data": data})


def shows(page, count: int) -> None:
    """Wait until the page shows this number of images."""
    word = "image" if count == 1 else "images"
    page.get_by_test_id("image-count").get_by_text(re.compile(rf"^{count} {word}\b")).wait_for()


def names(page) -> list[str]:
    """The cards' names in display order."""
    return page.locator(".hp-card .hp-file").all_inner_texts()


def by_name(page) -> dict[str, str]:
    """Captions by the name on the card, which includes the folder."""
    cards = page.locator(".hp-card").all()
    return {card.locator(".hp-file").inner_text(): card.locator("textarea").input_value() for card in cards}


def card(page, name: str):
    return page.locator(".hp-card").filter(has=page.locator(f".hp-file[title='{name}']"))


def draft_of(page) -> str:
    return page.evaluate("hangproof.draft()")


@pytest.fixture
def on_disk(monkeypatch, server):
    """The draft's functions, on the server's data folder."""
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    return draft


# Folders and files -------------------------------------------------------------------------------------------------


def two_folders(root: Path, green: int = 10) -> None:
    """a/ and b/ with a picture of one name each, captions, and one picture that both contain."""
    for folder, color in (("a", (200, green, 10)), ("b", (10, green, 203))):
        picture(root / folder / "1.png", color)
        (root / folder / "1.txt").write_text(f"the picture of {folder}")
        picture(root / folder / "2.png", (10, 190 + green, 10))


def test_folders_archives_and_files_are_added_however_they_come(tab, server, tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif")
    two_folders(tmp_path)
    two_folders(tmp_path / "set", 40)
    open_page(tab, server)
    os_drop(tab, tmp_path / "a", tmp_path / "b")
    shows(tab, 4)
    first = {"a/1.png": "the picture of a", "a/2.png": "", "b/1.png": "the picture of b", "b/2.png": ""}
    assert by_name(tab) == first
    assert "No such file" not in tab.locator(".hp-notes").inner_text()
    os_drop(tab, picture(tmp_path / "one.png", (90, 20, 30)), on=".hp-top")  # beside the zone: the page stays
    shows(tab, 5)
    assert set(names(tab)) == {*first, "one.png"}
    assert tab.url.startswith(server.url) and len(tab.context.pages) == 1
    with tab.expect_file_chooser() as chooser:
        tab.get_by_role("button", name="Choose a folder").click()
    chooser.value.set_files(str(tmp_path / "set"))
    shows(tab, 9)
    assert by_name(tab)["set/b/1.png"] == "the picture of b"

    pillow_heif.from_pillow(Image.open(photos("coffee.png")[0]).convert("RGB")).save(tmp_path / "phone.heic")
    Image.open(photos("rocket.jpg")[0]).save(tmp_path / "web.avif")
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        archive.write(photos("chelsea.png")[0], "cats/cat.png")
        archive.writestr("cats/cat.txt", "a cat")
    accept = tab.get_by_test_id("image-picker").get_attribute("accept").split(",")
    assert {".heic", ".avif", ".zip", ".txt"} <= set(accept)
    drop(tab, tmp_path / "phone.heic", tmp_path / "web.avif", tmp_path / "set.zip", count=12)
    assert "a cat" in captions(tab).values()
    tab.wait_for_function("() => [...document.querySelectorAll('.hp-card img')].every((i) => i.naturalWidth)")
    tab.locator(".hp-notes").get_by_text("3 images added.").wait_for()
    tab.get_by_label("Remove one.png").click()
    shows(tab, 11)
    assert "added" not in tab.locator(".hp-notes").inner_text()  # the sentence goes after a removal


def test_a_removal_a_caption_and_the_trigger_word_can_be_undone_and_redone(tab, server, tmp_path):
    open_page(tab, server)
    drop(tab, *[picture(tmp_path / f"{n}.png", (n * 60, 30, 90)) for n in range(3)], count=3)
    caption(tab, "1.png").fill("the middle")
    saved(tab, "1.png")
    undo, redo = (
        tab.locator(".hp-toolbar").get_by_role("button", name=re.compile(f"^{one}")) for one in ("Undo", "Redo")
    )
    undo.get_by_text("caption of 1.png").wait_for()
    tab.get_by_label("Remove 1.png").click()
    shows(tab, 2)
    undo.click()
    shows(tab, 3)
    assert captions(tab) == {"0.png": "", "1.png": "the middle", "2.png": ""}
    undo.click()
    until(lambda: captions(tab)["1.png"] == "", "the caption is undone")
    redo.click()
    until(lambda: captions(tab)["1.png"] == "the middle", "the caption is back")
    field(tab, "trigger").fill("tok")
    tab.get_by_role("button", name="Add trigger word to all captions").click()
    until(lambda: captions(tab)["0.png"] == "tok", "the trigger word")
    tab.locator(".hp-count").click()  # the focus is in no text field
    tab.keyboard.press("Control+z")
    until(lambda: captions(tab) == {"0.png": "", "1.png": "the middle", "2.png": ""}, "Ctrl+Z undoes the trigger word")
    tab.keyboard.press("Control+Shift+Z")
    until(lambda: captions(tab)["1.png"] == "tok, the middle", "Ctrl+Shift+Z redoes it")
    tab.reload()
    shows(tab, 3)
    undo.get_by_text("Undo: trigger word", exact=False).wait_for()  # the history is on disk


def test_images_are_reordered_by_keyboard_and_by_dragging(tab, server, tmp_path):
    open_page(tab, server)
    drop(tab, *[picture(tmp_path / f"{n}.png", (n * 60, 30, 90)) for n in range(4)], count=4)
    for n in range(4):
        caption(tab, f"{n}.png").fill(f"number {n}")
        saved(tab, f"{n}.png")
    tab.get_by_label("Move later: 0.png").focus()
    tab.keyboard.press("Enter")
    until(lambda: names(tab) == ["1.png", "0.png", "2.png", "3.png"], "moved later")
    has_focus(tab, "title", "Move later: 0.png")  # press again to move on
    tab.get_by_label("Move earlier: 3.png").focus()
    tab.keyboard.press("Enter")
    until(lambda: names(tab) == ["1.png", "0.png", "3.png", "2.png"], "moved earlier")
    source, target = (card(tab, name).locator(".hp-picture") for name in ("2.png", "1.png"))
    source.drag_to(target, target_position={"x": 20, "y": 60})
    until(lambda: names(tab) == ["2.png", "1.png", "0.png", "3.png"], "dragged to the front")
    assert captions(tab) == {f"{n}.png": f"number {n}" for n in range(4)}


def test_a_warning_on_a_card_is_fixed_with_one_click(tab, server, tmp_path):
    open_page(tab, server)
    field(tab, "trigger").fill("tok")
    drop(tab, picture(tmp_path / "tiny.png", (90, 20, 30), side=20), *photos("coffee.png"), count=2)
    warning = card(tab, "tiny.png").locator(".hp-warnings")
    warning.get_by_text("20 × 20 pixels").wait_for()
    card(tab, "coffee.png").get_by_role("button", name="Use the trigger word").click()
    until(lambda: captions(tab)["coffee.png"] == "tok", "the trigger word is the caption")
    assert "No caption" not in card(tab, "coffee.png").inner_text()
    warning.get_by_role("button", name="Remove it").click()
    shows(tab, 1)
    Image.open(photos("coffee.png")[0]).resize((598, 399)).save(tmp_path / "copy.png")
    drop(tab, tmp_path / "copy.png", count=2)
    near = tab.locator(".hp-warnings li").filter(has_text="Nearly identical").first
    near.get_by_role("button", name="Remove this one").click()
    shows(tab, 1)


def test_captions_are_filtered_replaced_and_images_removed_in_bulk(tab, server, tmp_path):
    open_page(tab, server)
    drop(tab, *[picture(tmp_path / f"{n:02}.png", (n * 15, 30, 90)) for n in range(16)], count=16)
    for n in (1, 14):
        if n == 14:
            tab.get_by_label("Go to page").fill("2")
            tab.keyboard.press("Enter")
            tab.get_by_text("Page 2 of 2").wait_for()
        caption(tab, f"{n:02}.png").fill("a grey cat, grey")
        saved(tab, f"{n:02}.png")
    tab.get_by_role("button", name="Edit captions in bulk").click()
    tab.get_by_label("Find in captions").fill("grey")
    tab.get_by_label("Replace with").fill("black <b>")
    tab.get_by_text("2 of 16 captions change.").wait_for()
    tab.get_by_role("button", name="Change 2 captions").click()
    tab.locator(".hp-notes").get_by_text("2 captions changed.").wait_for()
    assert captions(tab)["14.png"] == "a black <b> cat, black <b>"
    tab.get_by_label("Show", exact=True).select_option("Without caption")
    tab.get_by_test_id("image-count").get_by_text("14 shown").wait_for()
    assert "01.png" not in names(tab)
    tab.get_by_role("button", name="Select this page").click()
    tab.get_by_text("12 selected", exact=True).wait_for()
    tab.get_by_role("button", name="Remove selected").click()
    shows(tab, 4)
    tab.get_by_label("Show", exact=True).select_option("All images")
    until(lambda: names(tab) == ["01.png", "13.png", "14.png", "15.png"], "the other images stay")


def test_the_grid_can_be_skipped_an_image_opened_by_keyboard_and_each_control_shows_its_focus(tab, server):
    open_page(tab, server)
    drop(tab, *photos("coffee.png", "rocket.jpg"), count=2)
    controls = tab.locator(".hp-card").locator("button, input, textarea")
    tab.get_by_role("button", name="Select this page").focus()
    for _ in range(controls.count()):
        tab.keyboard.press("Tab")
        style = "(({ outlineStyle: s, outlineWidth: w, opacity: o }) => [s, w, o])(getComputedStyle(document.activeElement))"
        outline, width, opacity = tab.evaluate(style)
        name = tab.evaluate("document.activeElement.outerHTML.slice(0, 90)")
        assert outline != "none" and float(width.removesuffix("px")) >= 2 and opacity == "1", name
    skip = tab.get_by_role("link", name="Skip the images")
    skip.focus()
    assert skip.bounding_box()["x"] >= 0  # visible while it has the focus
    tab.keyboard.press("Enter")
    has_focus(tab, "id", "start")
    tab.get_by_label("Open coffee.png").focus()
    tab.keyboard.press("Enter")
    dialog = tab.locator("dialog[open]")
    dialog.get_by_text("coffee.png").wait_for()
    tab.wait_for_function("() => document.querySelector('.hp-editor img').naturalWidth >= 600")
    tab.keyboard.press("ArrowRight")
    dialog.get_by_text("rocket.jpg").wait_for()
    tab.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    has_focus(tab, "aria-label", "Open rocket.jpg")


# Two tabs, two browsers --------------------------------------------------------------------------------------------


def second(browser, page, server, own_storage: bool = False):
    """Another page with the same draft: a second tab, or another browser that continues the draft."""
    if not own_storage:
        other = page.context.new_page()
    else:
        context = browser.new_context()
        context.add_init_script(f"localStorage['hangproof-draft-id'] = '{draft_of(page)}'")
        other = context.new_page()
    other.set_default_timeout(90_000)
    open_page(other, server)
    return other


def keeps_its_list(page) -> None:
    """Fail the page's requests for the list of images, so that it shows what it had."""

    def respond(route) -> None:
        route.abort() if "list_images" in (route.request.post_data or "") else route.continue_()

    page.route(re.compile("/component_server"), respond)


def test_fields_and_captions_of_two_tabs_are_merged_one_by_one(tab, server, browser, on_disk):
    open_page(tab, server)
    drop(tab, *photos("coffee.png", "rocket.jpg"), count=2)

    def typed(page, key: str, value: str | int) -> None:
        field(page, key).fill(str(value))
        until(lambda: on_disk.form(draft_of(tab)).get(key) == value, f"{key} is stored")

    typed(tab, "name", "first")
    other = second(browser, tab, server)
    for page, key, value in ((tab, "epochs", 3), (other, "trigger", "tok"), (other, "repeats", 7)):
        typed(page, key, value)
    stored = on_disk.form(draft_of(tab))
    assert (stored["name"], stored["epochs"], stored["trigger"], stored["repeats"]) == ("first", 3, "tok", 7)
    until(lambda: field(other, "epochs").input_value() == "3", "the other tab shows the epochs")
    until(lambda: field(tab, "trigger").input_value() == "tok", "this tab shows the trigger word")
    captions_are_merged(tab, other, on_disk)


def captions_are_merged(tab, other, on_disk) -> None:
    """Each page types the caption of one of the two images."""
    for page, file, text in ((other, "rocket.jpg", "a rocket"), (tab, "coffee.png", "a cup")):
        caption(page, file).fill(text)
        saved(page, file)
    stored = {item.file: item.caption for item in on_disk.items(draft_of(tab))}
    assert stored == {"coffee.png": "a cup", "rocket.jpg": "a rocket"}


def test_another_browser_continues_a_draft_and_its_captions_are_merged(tab, server, browser, on_disk):
    open_page(tab, server)
    field(tab, "name").fill("to be continued")
    drop(tab, *photos("coffee.png", "rocket.jpg"), count=2)
    caption(tab, "coffee.png").fill("a cup to begin with")
    saved(tab, "coffee.png")
    with a_tab(browser) as other:
        open_page(other, server)
        other.get_by_role("button", name="Continue a draft").click()
        other.get_by_role("button", name=re.compile("to be continued · 2 images")).click()
        shows(other, 2)
        assert captions(other) == {"coffee.png": "a cup to begin with", "rocket.jpg": ""}
        until(lambda: field(other, "name").input_value() == "to be continued", "the name is shown")
        captions_are_merged(tab, other, on_disk)


def test_a_proposal_does_not_replace_what_was_typed_in_another_browser(tab, server, browser, on_disk, tmp_path):
    open_page(tab, server)
    drop(tab, *photos("coffee.png"), count=1)
    until(lambda: on_disk.form(draft_of(tab)).get("repeats") == 96, "the proposed repeats are stored")
    other = second(browser, tab, server, own_storage=True)  # hears nothing of the first page
    until(lambda: field(other, "repeats").input_value() == "96", "the other page shows them")
    other.evaluate("hangproof.merge = () => []")  # nor does it show what the server answers
    field(tab, "repeats").fill("7")
    until(lambda: on_disk.form(draft_of(tab)).get("repeats") == 7, "the typed repeats are stored")
    drop(other, picture(tmp_path / "b.png", (10, 10, 203)), picture(tmp_path / "c.png", (200, 10, 10)), count=3)
    button = other.get_by_role("button", name="Use proposed")  # where the page did not know yet that 96 was proposed
    until(
        lambda: field(other, "repeats").input_value() not in ("96", "7") or button.is_visible(),
        "the other page shows a proposal",
    )
    other.wait_for_timeout(2000)  # it was sent
    assert on_disk.form(draft_of(tab))["repeats"] == 7


def test_a_caption_is_never_stored_with_another_image_of_the_same_name(tab, server, browser, on_disk, tmp_path):
    open_page(tab, server)
    drop(tab, picture(tmp_path / "one" / "a.png", (200, 10, 10)), count=1)
    other = second(browser, tab, server, own_storage=True)
    keeps_its_list(other)
    tab.get_by_label("Remove a.png").click()
    tab.locator(".hp-drop:not(.hp-small)").wait_for()
    drop(tab, picture(tmp_path / "two" / "a.png", (10, 10, 203)), count=1)
    caption(other, "a.png").fill("the red picture")  # its card still shows the red one
    aside = other.locator(".hp-aside")
    aside.get_by_text("a.png was removed in another tab").wait_for()
    assert aside.locator("textarea").input_value() == "the red picture"  # not lost
    assert [item.caption for item in on_disk.items(draft_of(tab))] == [""]
