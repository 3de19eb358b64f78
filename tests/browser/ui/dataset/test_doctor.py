"""Check images and Write captions in a real browser, with the server killed in the middle of each job; axe-core; 390 px."""

from draft_helpers import photo
from PIL import Image
from ui_helpers import serving
from ui_page import a_tab, assert_accessible, caption, captions, drop, open_page, saved, until


def headings(page) -> dict[str, str]:
    """The findings on the page: their titles by kind."""
    found: dict[str, str] = page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('.hp-kind')]"
        ".map((one) => [one.dataset.kind, one.querySelector('summary').innerText]))"
    )
    return found


def check(page, left: tuple[str, ...] = ()) -> None:
    """Wait until the check has ended and shows these findings."""
    page.get_by_role("button", name="Check again").wait_for()
    until(lambda: set(left) <= set(headings(page)), f"{left} in {headings(page)}")


def pictures(folder, number: int):
    for n in range(number):
        photo(folder / f"{n}.png", seed=n, size=(640, 480))
    return [folder / f"{n}.png" for n in range(number)]


def test_images_are_checked_fixed_and_the_fixes_undone(browser, data, tmp_path):
    folder = tmp_path / "in"
    files = pictures(folder, 3)
    with Image.open(files[0]) as first:
        first.save(folder / "copy.png", compress_level=1)
        first.point(lambda value: value * 0.05).save(folder / "dark.png")
        first.resize((2000, 300)).save(folder / "wide.png")
        first.convert("CMYK").save(folder / "<b>cmyk.jpg")
    with a_tab(browser) as page:
        with serving(data) as server:
            port = server.port
            open_page(page, server)
            drop(page, *sorted(folder.iterdir()), count=7)
            page.get_by_test_id("check-images").click()
            check(page, ("duplicate", "dark", "cropped", "changed", "no_caption"))
            assert headings(page)["duplicate"] == "1 image is a copy of another one"
            page.locator(".hp-kind[data-kind=duplicate] summary").click()
            page.locator("figure[data-file='copy.png'], figure[data-file='0.png']").first.wait_for()
            page.locator(".hp-kind[data-kind=duplicate] .hp-actions-row").get_by_role("button", name="Remove").click()
            page.get_by_text("Removed 1 image.").wait_for()
            page.get_by_test_id("image-count").get_by_text("6 images").wait_for()
            until(lambda: "duplicate" not in headings(page), "the finding goes")
            page.locator("#image-check .hp-check-status").get_by_role("button", name="Undo").click()
            until(lambda: "duplicate" in headings(page), "undo brings it back")
            # One image, by keyboard.
            page.locator(".hp-kind[data-kind=cropped] summary").press("Enter")
            page.locator(".hp-kind[data-kind=cropped] .hp-part").wait_for()
            page.get_by_role("button", name="Crop: wide.png").press("Enter")
            until(lambda: "cropped" not in headings(page), "the image is cropped")
            # An edit of a card changes the findings.
            assert headings(page)["no_caption"].startswith("7 images")
            caption(page, "1.png").fill("a caption of mine")
            saved(page, "1.png")
            until(lambda: headings(page).get("no_caption", "").startswith("6 images"), "the findings follow the cards")
            page.get_by_test_id("buckets").locator("summary").first.click()
            page.locator(".hp-bucket summary").first.click()
            page.locator(".hp-bucket figure img").first.wait_for()
            assert_accessible(page, "#image-check")
            # A conversion that outlives the server.
            page.locator(".hp-kind[data-kind=changed] summary").click()
            page.locator(".hp-kind[data-kind=changed] figure button").click()
            until(lambda: "changed" not in headings(page), "it is converted")
            page.get_by_role("button", name="Check again").click()
            server.stop(hard=True)
        with serving(data, port=port) as server:
            page.set_viewport_size({"width": 390, "height": 800})
            open_page(page, server)
            assert captions(page)["1.png"] == "a caption of mine"
            page.get_by_test_id("check-images").click()
            check(page, ("duplicate", "dark", "no_caption"))
            assert {"changed", "cropped"}.isdisjoint(headings(page))
            assert_accessible(page, "#image-check")
            assert page.locator("#image-check b").count() == 0
        page.errors.clear()  # of the time without a server
