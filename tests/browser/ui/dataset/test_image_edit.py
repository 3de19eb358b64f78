"""The panel of one image: rotation, weight, crop and mask, by pointer and keyboard, and the image as wide as the page."""

import pytest
from draft_helpers import item_of, mask_of, top_ignored
from ui_helpers import photos
from ui_page import assert_accessible, captions, drop, field, has_focus, open_page, serious, until

from ui.dataset import draft


def test_one_image_is_enlarged_cropped_masked_rotated_and_repeated(tab, server, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    open_page(tab, server)
    drop(tab, *photos("coffee.png", "rocket.jpg"), count=2)
    mine = tab.evaluate("hangproof.draft()")

    def now() -> draft.Item:
        return item_of(mine, "coffee.png")

    def drag(part, *points: tuple[float, float]) -> None:
        part.scroll_into_view_if_needed()
        box = part.bounding_box()
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
        tab.mouse.move(*places[0])
        tab.mouse.down()
        for place in places[1:]:
            tab.mouse.move(*place, steps=5)
        tab.mouse.up()

    # as wide as the page, with its caption; the caption stays when it is small again
    card = tab.locator(".hp-card[data-file='coffee.png']")
    tab.get_by_label("Enlarge coffee.png").press("Enter")
    until(lambda: "-1600-" in card.locator("img").get_attribute("src"), "the large picture")
    card.locator("textarea").fill("a cup, coffee, saucer")
    tab.get_by_label("Enlarge coffee.png").press("Enter")
    until(lambda: now().caption == "a cup, coffee, saucer", "the caption is stored")
    assert captions(tab)["coffee.png"] == "a cup, coffee, saucer"

    # crop by pointer and by number
    tab.get_by_label("Edit coffee.png").press("Enter")
    panel = tab.locator("#image-edit")
    picture = panel.locator("#edit-crop img")
    picture.wait_for()
    drag(picture, (0.25, 0.25), (0.75, 0.75))
    until(lambda: now().crop is not None, "the drawn crop is stored")
    assert now().crop == pytest.approx((0.25, 0.25, 0.75, 0.75), abs=0.01)
    card.locator(".hp-tags", has_text="cropped").wait_for()
    until(lambda: panel.get_by_label("Width", exact=True).input_value() in ("299", "300", "301"), "the size in pixels")
    panel.get_by_label("Width", exact=True).fill("900")
    panel.get_by_label("Width", exact=True).press("Enter")
    panel.get_by_text("The crop has no area inside the image").wait_for()
    panel.get_by_label("Width", exact=True).fill("200")
    panel.get_by_label("Width", exact=True).press("Enter")
    until(lambda: now().trained_size[0] == 200, "the typed size is stored")
    tab.set_viewport_size({"width": 390, "height": 800})
    assert_accessible(tab, "#image-edit")
    tab.set_viewport_size({"width": 1280, "height": 900})

    # mask by pointer and from a file; it is shown again
    panel.get_by_role("tab", name="Mask").click()
    drag(panel.locator("#edit-mask canvas").first, (0.45, 0.5), (0.55, 0.5))
    panel.get_by_role("button", name="Save the mask").click()
    until(lambda: now().mask is not None, "the painted mask is stored")
    painted = mask_of(mine, now())
    height, width = painted.shape
    assert (height, width) == (400, 600) and painted[height // 2, width // 2] == 0 and painted[0, 0] == 255
    assert serious(tab, "#image-edit") == []
    for size, said in (((50, 50), "mask.png: the mask has 50 × 50 pixels and the image 600 × 400"), ((60, 40), "")):
        (tmp_path / "mask.png").write_bytes(top_ignored(*size))
        panel.locator("#mask-upload + input, #mask-upload input, input[type=file]").last.set_input_files(
            str(tmp_path / "mask.png")
        )
        if said:
            panel.get_by_text(said).wait_for()
    until(lambda: mask_of(mine, now()).shape == (40, 60), "the file is the mask")
    panel.get_by_role("button", name="Save the mask").click()
    until(lambda: mask_of(mine, now()).shape == (400, 600), "it was shown, and is saved as it was shown")
    assert not mask_of(mine, now())[:180].any() and (mask_of(mine, now())[220:] > 250).all()

    # rotation turns crop and mask; the weight changes the plan
    crop = now().crop
    panel.get_by_role("button", name="Rotate right").click()
    until(lambda: now().turn == 1, "the rotation is stored")
    assert now().crop == pytest.approx((1 - crop[3], crop[0], 1 - crop[1], crop[2]), abs=1e-5)
    panel.get_by_label("Weight").click()
    tab.get_by_role("option", name="3", exact=True).click()
    until(lambda: now().weight == 3, "the weight is stored")
    # The proposed repeats follow the weight, a moment later.
    uses = lambda: 4 * int(field(tab, "repeats").input_value())  # noqa: E731 - one image, and one three times
    until(lambda: f"shown {uses()} times" in tab.locator("#plan").inner_text(), "the weight is in the plan")
    panel.get_by_role("button", name="Remove the mask").click()
    until(lambda: now().mask is None, "the mask is removed")
    panel.get_by_role("button", name="Close").press("Enter")
    panel.wait_for(state="detached")
    has_focus(tab, "aria-label", "Edit coffee.png")
