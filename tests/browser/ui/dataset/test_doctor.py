"""Check images in a real browser: each finding is fixed and undone, by pointer and keyboard; axe-core at 390 pixels."""

import re

from draft_helpers import photo
from PIL import Image
from ui_page import assert_accessible, caption, drop, hold, open_page, press, saved, shows, unfold, until


def headings(page) -> dict[str, str]:
    """The findings on the page: their titles by kind."""
    found: dict[str, str] = page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('#check-kinds input')]"
        ".map((one) => [one.value, one.closest('label').innerText]))"
    )
    return found


def pictures(folder, number: int):
    for n in range(number):
        photo(folder / f"{n}.png", seed=n, size=(640, 480))
    return [folder / f"{n}.png" for n in range(number)]


def test_images_are_checked_fixed_and_the_fixes_undone(tab, server, tmp_path):
    folder = tmp_path / "in"
    files = pictures(folder, 3)
    with Image.open(files[0]) as first:
        first.save(folder / "copy.png", compress_level=1)
        first.point(lambda value: value * 0.05).save(folder / "dark.png")
        first.resize((2000, 300)).save(folder / "wide.png")
        first.convert("CMYK").save(folder / "<b>cmyk.jpg")
    open_page(tab, server)
    drop(tab, *sorted(folder.iterdir()), count=7)
    check = tab.locator("#image-check")

    def choose(kind: str):
        """Show the images of a finding."""
        check.locator(f"#check-kinds input[value={kind}]").click()
        return check.locator("#check-pictures")

    unfold(check.locator("button.label-wrap").first)
    found = {"duplicate", "dark", "cropped", "changed", "no_caption"}
    until(lambda: found <= set(headings(tab)), "the findings")
    assert headings(tab)["duplicate"] == "Copies: 1"
    choose("duplicate").locator("figure[data-file='copy.png'], figure[data-file='0.png']").first.wait_for()
    press(tab.locator("#check-fix").get_by_text("Remove"), tab.get_by_text("Removed 1 image."))
    shows(tab, 6)
    until(lambda: "duplicate" not in headings(tab), "the finding goes")
    check.get_by_role("button", name="Undo").click()
    until(lambda: "duplicate" in headings(tab), "undo brings it back")
    shows(tab, 7)
    # One image, by keyboard.
    choose("cropped").locator(".hp-part").wait_for()
    tab.get_by_role("button", name="Crop: wide.png").press("Enter")
    until(lambda: "cropped" not in headings(tab), "the image is cropped")
    # An edit of a card changes the findings.
    until(lambda: headings(tab).get("no_caption", "").endswith(" 7"), "no image has a caption")
    caption(tab, "1.png").fill("a caption of mine")
    saved(tab, "1.png")
    until(lambda: headings(tab).get("no_caption", "").endswith(" 6"), "the findings follow the cards")
    # A look that is on its way while the part is closed and opened again finds its event.
    statuses = []
    with hold(tab, to="**/queue/join*", first=True) as looks:
        caption(tab, "1.png").fill("another caption")
        looks()
        check.locator("button.label-wrap").first.click()
        check.locator("#check-kinds").wait_for(state="hidden")
        unfold(check.locator("button.label-wrap").first)
        check.locator("#check-kinds").wait_for()
        tab.on("response", lambda answer: "queue/join" in answer.url and statuses.append(answer.status))
    until(lambda: tab.wait_for_timeout(50) or statuses, "the answer")
    assert set(statuses) == {200}
    choose("buckets").get_by_text(re.compile("% kept|all of it is trained")).first.wait_for()
    choose("no_caption")
    press(check.get_by_role("button", name="Write captions…"), tab.get_by_text("6 selected", exact=True))
    tab.locator("#write-captions").wait_for()
    tab.set_viewport_size({"width": 390, "height": 800})
    assert_accessible(tab, "#image-check")
    assert check.locator("b").count() == 0
