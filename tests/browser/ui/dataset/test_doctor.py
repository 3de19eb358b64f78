"""Check images in a real browser: each finding is fixed and undone, by pointer and keyboard; axe-core at 390 pixels."""

from draft_helpers import photo
from PIL import Image
from ui_page import assert_accessible, caption, drop, open_page, saved, until


def headings(page) -> dict[str, str]:
    """The findings on the page: their titles by kind."""
    found: dict[str, str] = page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('.hp-kind')]"
        ".map((one) => [one.dataset.kind, one.querySelector('summary').innerText]))"
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
    tab.get_by_test_id("check-images").click()
    found = {"duplicate", "dark", "cropped", "changed", "no_caption"}
    until(lambda: found <= set(headings(tab)), "the findings")
    tab.get_by_role("button", name="Check again").wait_for()
    assert headings(tab)["duplicate"] == "1 image is a copy of another one"
    tab.locator(".hp-kind[data-kind=duplicate] summary").click()
    tab.locator("figure[data-file='copy.png'], figure[data-file='0.png']").first.wait_for()
    tab.locator(".hp-kind[data-kind=duplicate] .hp-actions-row").get_by_role("button", name="Remove").click()
    tab.get_by_text("Removed 1 image.").wait_for()
    tab.get_by_test_id("image-count").get_by_text("6 images").wait_for()
    until(lambda: "duplicate" not in headings(tab), "the finding goes")
    tab.locator("#image-check .hp-check-status").get_by_role("button", name="Undo").click()
    until(lambda: "duplicate" in headings(tab), "undo brings it back")
    # One image, by keyboard.
    tab.locator(".hp-kind[data-kind=cropped] summary").press("Enter")
    tab.locator(".hp-kind[data-kind=cropped] .hp-part").wait_for()
    tab.get_by_role("button", name="Crop: wide.png").press("Enter")
    until(lambda: "cropped" not in headings(tab), "the image is cropped")
    # An edit of a card changes the findings.
    assert headings(tab)["no_caption"].startswith("7 images")
    caption(tab, "1.png").fill("a caption of mine")
    saved(tab, "1.png")
    until(lambda: headings(tab).get("no_caption", "").startswith("6 images"), "the findings follow the cards")
    tab.locator(".hp-kind[data-kind=changed] summary").click()
    tab.locator(".hp-kind[data-kind=changed] figure button").click()
    until(lambda: "changed" not in headings(tab), "it is converted")
    tab.get_by_test_id("buckets").locator("summary").first.click()
    tab.locator(".hp-bucket summary").first.click()
    tab.locator(".hp-bucket figure img").first.wait_for()
    tab.set_viewport_size({"width": 390, "height": 800})
    assert_accessible(tab, "#image-check")
    assert tab.locator("#image-check b").count() == 0
    # All of it is stored: after a reload, a new check finds the same.
    tab.reload()
    tab.get_by_test_id("image-count").get_by_text("7 images").wait_for()
    tab.get_by_test_id("check-images").click()
    until(lambda: {"duplicate", "dark", "no_caption"} <= set(headings(tab)), "the findings after a reload")
    assert {"changed", "cropped"}.isdisjoint(headings(tab))
