"""Check images and Write captions in a real browser, with the server killed in the middle of each job; axe-core; 390 px."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from caption_server import answering, slow
from draft_helpers import photo
from PIL import Image
from ui_helpers import browsing, kill_runs, serving
from ui_page import a_tab, caption, captions, drop, faint_texts, nameless_controls, open_page, saved, until


@pytest.fixture
def data(tmp_path):
    yield tmp_path / "data"
    kill_runs(tmp_path / "data")


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


def serious(page, part: str) -> list[str]:
    found = Axe().run(page, context=part).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in ("serious", "critical")
    ]


def assert_accessible(page, part: str) -> None:
    assert serious(page, part) == []
    assert faint_texts(page) == [] and nameless_controls(page) == []
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"the page scrolls sideways by {wide} pixels"


def pictures(folder, number: int):
    for n in range(number):
        photo(folder / f"{n}.png", seed=n, size=(640, 480))
    return [folder / f"{n}.png" for n in range(number)]


def test_images_are_checked_fixed_and_the_fixes_undone(data, tmp_path):
    folder = tmp_path / "in"
    files = pictures(folder, 3)
    with Image.open(files[0]) as first:
        first.save(folder / "copy.png", compress_level=1)
        first.point(lambda value: value * 0.05).save(folder / "dark.png")
        first.resize((2000, 300)).save(folder / "wide.png")
        first.convert("CMYK").save(folder / "<b>cmyk.jpg")
    with browsing() as browser, a_tab(browser) as page:
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


@pytest.mark.long
def test_captions_are_written_while_the_server_is_killed(data, tmp_path):
    files = pictures(tmp_path / "in", 6)
    with answering() as model, browsing() as browser, a_tab(browser) as page:
        model.answer = slow(1.0, "<b>a picture</b>")
        with serving(data, MY_KEY="sk-0123") as server:
            port = server.port
            open_page(page, server)
            page.locator("#trigger input, #trigger textarea").first.fill("ohwx")
            drop(page, *files, count=6)
            caption(page, "0.png").fill("mine")
            saved(page, "0.png")
            page.get_by_test_id("write-captions").click()
            form = page.locator("#caption-writer")
            form.get_by_label("Server", exact=False).first.check()
            form.get_by_role("button", name="Write captions").click()
            form.get_by_text("Enter the server's address").wait_for()
            form.get_by_label("Address").fill(model.url)
            form.get_by_label("Model", exact=True).locator("visible=true").fill("vision")
            form.get_by_label("Variable with the API key").fill("sk-0123")
            form.get_by_role("button", name="Write captions").click()
            form.get_by_text("not the key itself").wait_for()
            form.get_by_label("Variable with the API key").fill("MY_KEY")
            assert form.get_by_label("Put the trigger word").is_checked()
            assert form.get_by_label("Images without a caption (5)").is_checked()
            assert_accessible(page, "#caption-writer")
            form.get_by_role("button", name="Write captions").click()
            until(lambda: model.questions, "the job asks the server")
            server.stop(hard=True)
        asked = len(model.questions)
        until(lambda: len(model.questions) > asked, "the job goes on without the page")
        with serving(data, port=port, MY_KEY="sk-0123") as server:
            page.set_viewport_size({"width": 390, "height": 800})
            open_page(page, server)
            page.locator("#caption-writer").get_by_text("Finished. 5 of 5 captions written").wait_for(state="attached")
            if page.locator("#caption-writer").is_hidden():  # the job had ended before the page was opened again
                page.get_by_test_id("write-captions").click()
            page.locator("#caption-writer").get_by_text("Finished. 5 of 5 captions written").wait_for()
            until(lambda: all(captions(page).values()), f"all captions: {captions(page)}")
            written = captions(page)
            assert written.pop("0.png") == "mine"
            assert all(text.startswith("ohwx, <b>a picture</b> ") for text in written.values())
            assert len(set(written.values())) == 5 and len(model.questions) == 5, "none was asked for twice"
            assert {one["authorization"] for one in model.headers} == {"Bearer sk-0123"}
            assert_accessible(page, "#caption-writer")
            # A person's caption is replaced only where the box is checked; a model's one is not asked about.
            model.answer = lambda number, question: "again"
            form = page.locator("#caption-writer")
            form.get_by_label("All images (6)").check()
            replace = form.get_by_label("Replace captions that I wrote")
            assert not replace.is_checked()
            form.get_by_role("button", name="Write captions").click()
            until(lambda: sorted(captions(page).values()) == ["mine"] + ["ohwx, again"] * 5, f"{captions(page)}")
            # Cancel, then continue.
            model.answer = slow(1.5, "late")
            until(lambda: form.get_by_label("All images (6)").is_visible(), "the form is back")
            form.get_by_label("All images (6)").check()
            replace.check()
            form.get_by_role("button", name="Write captions").click()
            until(lambda: sum("late" in text for text in captions(page).values()) >= 1, "the first caption")
            form.get_by_role("button", name="Cancel").click()
            form.get_by_text("Cancelled.").wait_for()
            model.answer = lambda number, question: "continued"
            form.get_by_role("button", name="Continue").click()
            until(
                lambda: "again" not in "".join(captions(page).values()) and "mine" not in captions(page).values(),
                "the rest",
            )
            found = sorted(text.split()[1] for text in captions(page).values())
            assert found.count("late") >= 1 and set(found) == {"late", "continued"}, "what was written stays"
        page.errors.clear()
    everything = [path.read_bytes() for path in data.rglob("*") if path.is_file()] + [
        path.read_bytes() for path in tmp_path.glob("*.log")
    ]
    assert not any(b"sk-0123" in content for content in everything)
