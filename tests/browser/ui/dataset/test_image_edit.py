"""The large view of an image: caption, rotation, crop, mask and weight, stored at once, and what a run gets of them."""

import re

import pytest
from draft_helpers import item_of, mask_of, photo, top_ignored
from ui_helpers import photos, serving
from ui_page import PATIENCE_S, a_tab, captions, drop, field, has_focus, hold, open_page, serious, serving_again, until

from ui.dataset import draft


def test_the_large_view_edits_by_keyboard_and_pointer_and_survives_a_killed_server(browser, data, tmp_path):
    small = [photo(tmp_path / f"t{n:02}.png", n, size=(300, 200)) for n in range(12)]
    with serving(data) as server, a_tab(browser) as page:
        open_page(page, server)
        drop(page, *photos("coffee.png"), *small, count=13)
        mine = page.evaluate("hangproof.draft()")

        def now(file: str = "coffee.png") -> draft.Item:
            return item_of(mine, file)

        def changed(what: str) -> None:
            """Wait until another mask is stored than the last time."""
            until(lambda: now().mask not in masks, what)
            masks.append(now().mask)

        # opened, browsed over both pages and closed by keyboard; the focus returns to the card that was shown last
        page.get_by_label("Open coffee.png").press("Enter")
        view = page.locator("dialog.hp-editor[open]")
        view.get_by_text("1 of 13").wait_for()
        caption = view.get_by_label("Caption", exact=True)
        caption.fill("a cup, coffee, saucer")
        view.get_by_text("21 characters, about 6 tokens").wait_for()
        view.get_by_text("saved", exact=True).wait_for()
        assert now().caption == "a cup, coffee, saucer"
        until(lambda: captions(page)["coffee.png"] == now().caption, "the card shows the caption")
        caption.press("PageDown")
        view.get_by_text("2 of 13").wait_for()
        page.keyboard.press("Escape")
        view.wait_for(state="detached")
        has_focus(page, "aria-label", "Open t00.png")
        page.get_by_label("Open t10.png").click()
        page.keyboard.press("ArrowRight")  # to the next page of cards
        view.get_by_text("13 of 13").wait_for()
        page.keyboard.press("Escape")

        # an image that no longer fits the filter stays open; a removed one is followed by the next
        page.get_by_label("Show", exact=True).select_option("no_caption")
        page.get_by_test_id("image-count").get_by_text("12 shown").wait_for()
        page.get_by_label("Open t09.png").click()
        caption.fill("it leaves the filter now")
        view.get_by_text("saved", exact=True).wait_for()
        view.get_by_role("button", name="Rotate right").click()
        view.get_by_role("heading", name="t09.png · 200 × 300").wait_for()
        caption.press("PageDown")
        view.get_by_role("heading", name="t10.png").wait_for()
        view.get_by_role("button", name="Remove image").click()
        view.get_by_role("heading", name="t11.png").wait_for()
        view.get_by_text("10 of 10").wait_for()
        page.keyboard.press("Escape")
        page.get_by_label("Show", exact=True).select_option("All images")

        # crop by number fields and by pointer
        page.get_by_label("Open coffee.png").click()
        view.get_by_role("button", name="Crop", exact=True).press("Enter")
        view.get_by_label("Ratio", exact=True).select_option("1:1")
        until(lambda: now().crop is not None, "the square is stored")
        assert now().trained_size == (400, 400)
        width = view.get_by_label("Width", exact=True)
        width.fill("300")
        width.press("PageDown")  # what was typed is of the image that is left
        view.get_by_text("2 of 12").wait_for()
        assert width.input_value() == "300"  # all of that image
        width.press("PageUp")
        until(lambda: now().trained_size == (300, 300), "the typed size is stored")
        assert [item.crop for item in draft.items(mine)[1:]] == [None] * 11
        frame = page.locator(".hp-edit-frame")
        view.get_by_label("Ratio", exact=True).select_option("")
        view.get_by_role("button", name="Use the whole image").click()
        until(lambda: now().crop is None, "the whole image is stored")

        def drag(*points: tuple[float, float], key: str = "F9") -> None:
            box = frame.bounding_box()
            places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
            page.mouse.move(*places[0])
            page.mouse.down()
            for place in places[1:]:
                page.mouse.move(*place, steps=2)
            page.keyboard.press(key)  # before the button is let go
            page.mouse.up()

        drag((0.25, 0.25), (0.75, 0.75), key="PageDown")  # the image that is dragged over stays
        drawn = pytest.approx((0.25, 0.25, 0.75, 0.75), abs=0.01)
        until(lambda: now().crop is not None and now().crop == drawn, "the drawn crop is stored")
        crop = now().crop
        drag((0.1, 0.1), (0.2, 0.2), key="Escape")  # the view is closed: nothing is drawn
        page.get_by_label("Open coffee.png").click()
        page.locator(".hp-card[data-file='coffee.png'] .hp-tags", has_text="cropped").wait_for()

        # mask by pointer, keyboard and file
        masks = [None]
        view.get_by_role("button", name="Mask", exact=True).click()
        drag((0.3, 0.5), (0.7, 0.5), key="PageDown")
        changed("the stroke is stored")
        assert now().crop == crop
        painted = mask_of(mine, now())
        height, width = painted.shape
        assert painted[height // 2, width // 2] == 0 and painted[0, 0] == 255
        frame.focus()
        for _ in range(4):
            page.keyboard.press("Shift+ArrowUp")
        page.keyboard.press("Space")
        changed("the dab is stored")
        assert (mask_of(mine, now()) == 0).sum() > (painted == 0).sum()
        view.get_by_role("button", name="Eraser", exact=True).click()
        drag((0.3, 0.5), (0.7, 0.5))
        changed("the erased stroke is stored")
        assert mask_of(mine, now())[height // 2, width // 2] == 255
        view.get_by_role("button", name="Invert", exact=True).click()
        changed("the inverted mask is stored")
        assert mask_of(mine, now())[height // 2, width // 2] == 0
        file = tmp_path / "mask.png"
        file.write_bytes(top_ignored(60, 40))
        page.get_by_test_id("mask-picker").set_input_files(str(file))
        changed("the file is the mask")
        view.get_by_role("button", name=re.compile("^Undo")).click()
        until(lambda: now().mask == masks[-2], "the file is undone")
        view.get_by_role("button", name=re.compile("^Redo")).click()
        until(lambda: now().mask == masks[-1], "the file is back")

        # a stroke before the image's mask is there does not replace it
        view.get_by_role("button", name="Brush", exact=True).click()
        with hold(page, '"open"'):
            for key, place in (("PageDown", 2), ("PageUp", 1)):
                page.keyboard.press(key)
                view.get_by_text(f"{place} of 12").wait_for()
            drag((0.3, 0.9), (0.7, 0.9))
        until(lambda: page.evaluate(INK) > 0, "the mask is on the canvas")
        drag((0.3, 0.8), (0.7, 0.8))
        changed("the stroke after it is stored")
        view.get_by_text("Mask stored").wait_for()
        assert mask_of(mine, now())[0, 0] == 0

        # rotation turns crop and mask; the weight changes the plan
        crop = now().crop
        view.get_by_role("button", name="Rotate right").click()
        until(lambda: now().turn == 1, "the rotation is stored")
        assert now().crop == pytest.approx((1 - crop[3], crop[0], 1 - crop[1], crop[2]), abs=1e-5)
        weight = view.get_by_label("Weight")
        weight.fill("3")
        weight.press("PageDown")
        until(lambda: now().weight == 3, "the weight is stored")
        view.get_by_text("2 of 12").wait_for()
        assert weight.input_value() == "1"
        weight.press("PageUp")
        view.get_by_text("1 of 12").wait_for()
        # The proposed repeats follow the weight, a moment later.
        uses = lambda: 14 * int(field(page, "repeats").input_value())  # noqa: E731 - 11 images, and one three times
        until(lambda: f"shown {uses()} times" in page.locator("#plan").inner_text(), "the weight is in the plan")

        # the server is killed; what is painted then is kept in the browser, and the restarted server gets it
        server.stop(hard=True)
        box = frame.bounding_box()
        view.get_by_role("button", name="Brush", exact=True).click()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.9)
        view.get_by_text("The mask is not stored yet").wait_for()
        before = now()
        assert (before.turn, before.weight, before.caption) == (1, 3, "a cup, coffee, saucer")
        with serving_again([page], data, server.port) as again:
            until(lambda: now().mask != before.mask, "the kept mask is stored", 2 * PATIENCE_S)
            after = now()
            assert (after.turn, after.crop, after.weight) == (1, before.crop, 3)
            page.set_viewport_size({"width": 390, "height": 800})
            open_page(page, again)
            page.locator(".hp-card[data-file='coffee.png'] .hp-tags", has_text="cropped · mask · ×3").wait_for()
            page.get_by_label("Open coffee.png").click()
            view.get_by_role("button", name="Mask", exact=True).click()
            until(lambda: page.evaluate(INK) > 0, "the stored mask is on the canvas")
            assert page.evaluate("document.querySelector('.hp-editor').scrollWidth") <= 390
            assert serious(page, ".hp-editor") == []
            view.get_by_role("button", name="Clear", exact=True).click()
            until(lambda: now().mask is None, "the mask is cleared")
            page.errors.clear()  # of the time without a server


# The part of the mask's canvas that is painted.
INK = """() => {
  const canvas = document.querySelector(".hp-mask-canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, n) => n % 4 === 3 && value > 0).length;
}"""
