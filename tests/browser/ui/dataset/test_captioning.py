"""Captions of a server with an API key: the form's errors, what is kept, cancel and continue, where the key is."""

import threading

from caption_server import answering
from draft_helpers import photo
from ui_helpers import serving
from ui_page import RUN_S, a_tab, assert_accessible, caption, captions, drop, open_page, press, saved, unfold, until
from ui_requests import files_with

KEY = "sk-0123"


def test_captions_are_written_shown_replaced_and_continued(browser, data, tmp_path):
    files = [photo(tmp_path / f"{n}.png", seed=n, size=(320, 240)) for n in range(3)]
    works, refused = [], []

    def fail(route) -> None:
        """The cards' requests fail once the model has answered, until the test says that they work."""
        listing = b"list_images" in (route.request.post_data_buffer or b"")
        if listing and model.questions and not works:
            refused.append(route)
            route.abort()
        else:
            route.continue_()

    with answering() as model, serving(data, MY_KEY=KEY) as server, a_tab(browser, width=390, height=800) as page:
        model.answer = lambda number, question: f"<b>a picture</b> {number}"
        page.route("**/component_server**", fail)
        open_page(page, server)
        page.locator("#trigger input, #trigger textarea").first.fill("ohwx")
        drop(page, *files, count=3)
        caption(page, "0.png").fill("mine")
        saved(page, "0.png")
        form = page.locator("#caption-writer")
        unfold(form.locator("button.label-wrap").first)
        write = page.locator("#write-captions")
        form.get_by_label("Server", exact=True).check()
        press(write, form.get_by_text("Enter the server's address"))
        form.get_by_label("Address").fill(model.url)
        form.get_by_label("Model", exact=True).locator("visible=true").fill("vision")
        form.get_by_label("Variable with the API key").fill("MY_KEY")
        assert_accessible(page, "#caption-writer")
        press(write, form.get_by_text("Finished. 2 of 2 captions written"))
        until(lambda: page.wait_for_timeout(50) or refused, "the cards cannot be asked for")
        works.append(True)
        written = [f"ohwx, <b>a picture</b> {n}" for n in (1, 2)]
        until(lambda: sorted(captions(page).values()) == ["mine", *written], "the captions are on the cards")
        assert {one["authorization"] for one in model.headers} == {f"Bearer {KEY}"}

        # A person's caption is replaced only where the box is checked. What a cancelled job wrote stays.
        cancelled, first = threading.Event(), len(model.questions) + 1
        model.answer = lambda number, question: "late" if number == first or cancelled.wait(RUN_S) else None
        form.get_by_label("All images (3)").check()
        assert not form.get_by_label("Replace captions that I wrote").is_checked()
        form.get_by_label("Replace captions that I wrote").check()
        write.click()
        until(lambda: any("late" in text for text in captions(page).values()), "the first caption")
        press(form.get_by_role("button", name="Cancel"), form.get_by_text("Cancelled."))
        cancelled.set()
        model.answer = lambda number, question: "continued"
        form.get_by_role("button", name="Continue").click()
        expected = ["continued", "continued", "late"]
        until(lambda: sorted(text.split()[-1] for text in captions(page).values()) == expected, "the rest")
        page.errors.clear()  # of the requests that failed
    assert files_with(KEY, tmp_path) == []
