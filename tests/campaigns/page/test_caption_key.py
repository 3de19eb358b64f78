"""Captions that a server writes with an API key while the page's server is killed."""

from caption_server import answering, slow
from draft_helpers import photo
from ui_helpers import serving
from ui_page import a_tab, assert_accessible, caption, captions, drop, open_page, saved, until


def pictures(folder, number: int):
    for n in range(number):
        photo(folder / f"{n}.png", seed=n, size=(640, 480))
    return [folder / f"{n}.png" for n in range(number)]


def test_captions_are_written_while_the_server_is_killed(browser, data, tmp_path):
    files = pictures(tmp_path / "in", 6)
    with answering() as model, a_tab(browser) as page:
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
