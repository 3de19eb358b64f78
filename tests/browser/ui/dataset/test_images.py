"""Step 2 in a real browser: folders, undo, order, warnings, and the same draft in two tabs and two browsers."""

import re

from draft_helpers import photo
from PIL import Image
from ui_page import a_tab, caption, captions, drop, field, has_focus, hold, open_page, saved, shows, until

from ui.dataset import draft

HOSTILE = 'a "cat" <img src=x onerror="document.title=\'gone\'"> ${7*7} {{7*7}} \'é💥'


def os_drop(page, *paths, on: str = ".hp-drop") -> None:
    """Drop files and folders from the system onto the middle of an element."""
    page.locator(on).scroll_into_view_if_needed()
    box = page.locator(on).bounding_box()
    where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, **where, "data": data})


def names(page) -> list[str]:
    """The cards' names in display order."""
    return page.locator(".hp-card .hp-file").all_inner_texts()


def by_name(page) -> dict[str, str]:
    """Captions by the name on the card, which includes the folder."""
    return captions(page, "card.querySelector('.hp-file').innerText")


def card(page, name: str):
    return page.locator(".hp-card").filter(has=page.locator(f".hp-file[title='{name}']"))


def two_folders(root, seed: int = 0) -> None:
    """a/ and b/ with a picture of one name each, captions, and one picture that both contain."""
    for number, folder in enumerate("ab"):
        photo(root / folder / "1.png", seed + number)
        (root / folder / "1.txt").write_text(f"the picture of {folder}")
        photo(root / folder / "2.png", seed + 2)


def test_folders_and_files_are_added_however_they_come(tab, server, tmp_path):
    two_folders(tmp_path)
    two_folders(tmp_path / "set", 40)
    open_page(tab, server)
    (tmp_path / "empty").mkdir()
    os_drop(tab, tmp_path / "empty")
    tab.locator(".hp-notes").get_by_text("There are no files to add.").wait_for()
    os_drop(tab, tmp_path / "a", tmp_path / "b")
    shows(tab, 4)
    first = {"a/1.png": "the picture of a", "a/2.png": "", "b/1.png": "the picture of b", "b/2.png": ""}
    assert by_name(tab) == first
    assert "No such file" not in tab.locator(".hp-notes").inner_text()
    os_drop(tab, photo(tmp_path / "one.png", 70), on=".hp-top")  # beside the zone: the page stays
    shows(tab, 5)
    assert set(names(tab)) == {*first, "one.png"}
    assert tab.url.startswith(server.url) and len(tab.context.pages) == 1
    with tab.expect_file_chooser() as chooser:
        tab.get_by_role("button", name="Choose a folder").click()
    chooser.value.set_files(str(tmp_path / "set"))
    shows(tab, 9)
    assert by_name(tab)["set/b/1.png"] == "the picture of b"

    accept = tab.get_by_test_id("image-picker").get_attribute("accept").split(",")
    assert {".heic", ".avif", ".zip", ".txt"} <= set(accept)
    uploads = []
    tab.on("request", lambda request: uploads.append(request.url) if "/upload" in request.url else None)
    drop(tab, *(photo(tmp_path / f"{n}.png", 80 + n) for n in range(20)), count=29)
    assert len(uploads) == 1, "thousands of small files do not take thousands of requests"
    tab.wait_for_function("() => [...document.querySelectorAll('.hp-card img')].every((i) => i.naturalWidth)")
    tab.locator(".hp-notes").get_by_text("20 images added.").wait_for()
    tab.get_by_label("Remove one.png").click()
    shows(tab, 28)
    tab.locator(".hp-notes").get_by_text("added").wait_for(state="detached")  # the sentence goes after a removal


def test_captions_stay_with_their_images_and_each_change_can_be_undone_and_redone(tab, server, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    open_page(tab, server)
    # Captions, typed and from files.
    (tmp_path / "chelsea.txt").write_text("a tabby cat", encoding="utf-8")
    files = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.png")
    *first, rocket = (photo(tmp_path / file, seed, size=(300, 200)) for seed, file in enumerate(files))
    drop(tab, *first, tmp_path / "chelsea.txt", count=3)
    assert captions(tab) == {"astronaut.png": "", "chelsea.png": "a tabby cat", "coffee.png": ""}
    warning = card(tab, "astronaut.png").locator(".hp-warnings").get_by_text("No caption")
    warning.wait_for()
    for typed, shown in (("an astronaut", 0), ("", 1)):  # what the card says follows what is typed
        caption(tab, "astronaut.png").fill(typed)
        saved(tab, "astronaut.png")
        caption(tab, "astronaut.png").blur()
        until(lambda shown=shown: warning.count() == shown, f"what the card says of the caption {typed!r}")
    caption(tab, "coffee.png").fill(HOSTILE)
    drop(tab, rocket, count=4)  # while the caption is still being saved
    assert captions(tab)["coffee.png"] == HOSTILE
    saved(tab, "coffee.png")
    with hold(tab, "remove_images"):
        tab.get_by_label("Remove astronaut.png").click()
        caption(tab, "coffee.png").focus()
    shows(tab, 3)
    has_focus(tab, "aria-label", "Caption of coffee.png")  # it stays with who types by now
    before = {"chelsea.png": "a tabby cat", "coffee.png": HOSTILE, "rocket.png": ""}
    assert captions(tab) == before

    # Undo and redo, by button and by keyboard.
    bar = tab.locator(".hp-toolbar")
    undo, redo = (bar.get_by_role("button", name=re.compile(f"^{one}")) for one in ("Undo", "Redo"))
    undo.click()
    shows(tab, 4)
    assert captions(tab) == {"astronaut.png": "", **before}
    redo.click()
    shows(tab, 3)
    field(tab, "name").fill(HOSTILE)
    field(tab, "trigger").fill("tok")
    tab.get_by_role("button", name="Add trigger word to all captions").click()
    after = {"chelsea.png": "tok, a tabby cat", "coffee.png": "tok, " + HOSTILE, "rocket.png": "tok"}
    until(lambda: captions(tab) == after, "the trigger word")
    tab.locator(".hp-count").click()  # the focus is in no text field
    tab.keyboard.press("Control+z")
    until(lambda: captions(tab) == before, "Ctrl+Z undoes the trigger word")
    tab.keyboard.press("Control+Shift+Z")
    until(lambda: captions(tab) == after, "Ctrl+Shift+Z redoes it")
    mine = tab.evaluate("hangproof.draft()")
    typed = {"name": HOSTILE, "trigger": "tok"}
    until(lambda: typed.items() <= draft.form(mine).items(), "fields are stored")
    tab.reload()
    shows(tab, 3)
    assert captions(tab) == after and tab.title() == "Hangproof"
    until(lambda: {key: field(tab, key).input_value() for key in typed} == typed, "the fields after a reload")
    undo.get_by_text("Undo: trigger word", exact=False).wait_for()  # the history is on disk

    # A warning on a card is fixed with one click.
    Image.open(tmp_path / "coffee.png").resize((298, 199)).save(tmp_path / "copy.png")
    drop(tab, tmp_path / "copy.png", count=4)
    card(tab, "copy.png").get_by_role("button", name="Use the trigger word").click()
    until(lambda: captions(tab)["copy.png"] == "tok", "the trigger word is the caption")
    card(tab, "copy.png").get_by_text("No caption").wait_for(state="detached")
    near = tab.locator(".hp-warnings li").filter(has_text="Nearly identical")
    near.first.get_by_role("button", name="Remove this one").click()
    shows(tab, 3)

    for name in ("chelsea.png", "rocket.png"):
        tab.get_by_label(f"Select {name}").press("Space")
    tab.get_by_text("2 selected", exact=True).wait_for()
    tab.get_by_role("button", name="Remove selected").click()
    shows(tab, 1)
    undo.click()
    shows(tab, 3)
    # What is removed in another way is no longer selected.
    tab.get_by_role("button", name="Select all 3").click()
    draft.remove(mine, [draft.items(mine)[0].id])
    tab.get_by_label("Remove coffee.png").press("Enter")
    tab.get_by_text("1 selected", exact=True).wait_for()
    tab.get_by_role("button", name="Remove all").click()
    tab.locator(".hp-selection").wait_for(state="hidden")


def type_captions(pages: dict) -> None:
    """Type a caption in each page, by file."""
    for file, (page, text) in pages.items():
        caption(page, file).fill(text)
        saved(page, file)


def test_two_tabs_and_another_browser_share_a_draft_and_merge_it(browser, server, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    with a_tab(browser) as tab, a_tab(browser) as far:
        other, *more = (tab.context.new_page() for _ in range(7))  # a browser has six connections to a server
        for page in (tab, other, *more):
            page.goto(server.url, wait_until="commit")
        for page in (tab, other, *more):
            page.locator("body.hp-open").wait_for()
        mine = tab.evaluate("hangproof.draft()")
        assert other.evaluate("hangproof.draft()") == mine, "two tabs of a new browser share one draft"
        drop(tab, photo(tmp_path / "coffee.png", 90), photo(tmp_path / "rocket.png", 91), count=2)
        field(tab, "name").fill("shared")
        field(other, "trigger").fill("tok")
        until(lambda: field(other, "name").input_value() == "shared", "the other tab shows the name")
        until(lambda: field(tab, "trigger").input_value() == "tok", "this tab shows the trigger word")
        typed = {"name": "shared", "trigger": "tok"}
        until(lambda: typed.items() <= draft.form(mine).items(), "both are stored")
        shows(other, 2)
        type_captions({"rocket.png": (other, "a rocket"), "coffee.png": (tab, "a cup")})
        field(tab, "repeats").fill("7")
        until(lambda: field(other, "repeats").input_value() == "7", "the other tab shows the repeats")

        # Another browser continues the draft.
        drop(tab, photo(tmp_path / "one" / "a.png", 92), count=3)
        open_page(far, server)
        far.get_by_role("button", name="Continue a draft").click()
        far.get_by_role("button", name=re.compile("shared · 3 images")).first.click()
        shows(far, 3)
        assert captions(far) == {"coffee.png": "a cup", "rocket.png": "a rocket", "a.png": ""}
        until(lambda: field(far, "name").input_value() == "shared", "the name is shown")
        type_captions({"coffee.png": (far, "a cup, from far"), "rocket.png": (tab, "a rocket here")})
        stored = {item.file: item.caption for item in draft.items(mine)}
        assert stored == {"coffee.png": "a cup, from far", "rocket.png": "a rocket here", "a.png": ""}

        # A caption is never stored with another image of the same name.
        with hold(far, "list_images"):  # its cards stay as they are
            tab.get_by_label("Remove a.png").click()
            shows(tab, 2)
            drop(tab, photo(tmp_path / "two" / "a.png", 93), count=3)
            caption(far, "a.png").fill("the first picture")  # its card still shows the first one
            aside = far.locator(".hp-aside")
            aside.get_by_text("a.png was removed in another tab").wait_for()
            assert aside.locator("textarea").input_value() == "the first picture"  # not lost
            assert [item.caption for item in draft.items(mine) if item.file == "a.png"] == [""]

        # Pages of cards keep what was typed, and follow the other tab.
        many = [photo(tmp_path / f"{n:02}.png", n) for n in range(10)]
        drop(tab, *many, count=13)
        tab.get_by_text("Page 1 of 2").wait_for()
        first = next(iter(captions(tab)))
        caption(tab, first).fill("typed")
        tab.get_by_role("button", name="Next ›").click()  # at once: the next page waits for the caption
        tab.get_by_text("Page 2 of 2").wait_for()
        assert len(captions(tab)) == 1
        tab.get_by_role("button", name="‹ Previous").click()
        tab.get_by_text("Page 1 of 2").wait_for()
        assert captions(tab)[first] == "typed"
        type_captions({first: (other, "from the other tab")})
        until(lambda: captions(tab)[first] == "from the other tab", "the card follows the other tab")
