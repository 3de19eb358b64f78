"""Captions that are written in two browsers at once while the page's server is killed, and a run that is trained with them."""

import json

import pytest
from caption_server import answering, slow
from draft_helpers import photo
from two_browsers import continue_draft, stays_open, two_browsers, was_not_reloaded
from ui_helpers import serving
from ui_page import caption, captions, choose_tiny, drop, faint_texts, field, open_page, saved, state_is, until

IMAGES = 8


def written(page) -> int:
    """How many captions the page shows that the server wrote."""
    return sum("a slow picture" in text for text in captions(page).values())


@pytest.mark.timeout(1500)
def test_captions_are_written_in_two_browsers_while_the_server_is_killed(browser, data, tmp_path):
    files = [photo(tmp_path / "in" / f"{number}.png", seed=number) for number in range(IMAGES)]
    with answering() as model, two_browsers(browser) as (one, other):
        model.answer = slow(2.0)
        with serving(data) as server:
            open_page(one, server)
            choose_tiny(one)
            for key, text in (("name", "bird"), ("trigger", "ohwx"), ("epochs", "1"), ("repeats", "1")):
                field(one, key).fill(text)
                field(one, key).blur()
            drop(one, *files, count=IMAGES)
            continue_draft(other, server)
            stays_open(one, other)
            one.get_by_test_id("write-captions").click()
            panel, there = one.locator("#caption-writer"), other.locator("#caption-writer")
            panel.get_by_label("Server", exact=False).first.check()
            panel.get_by_label("Address").fill(model.url)
            panel.get_by_label("Model", exact=True).locator("visible=true").fill("vision")
            panel.get_by_role("button", name="Write captions").click()

            # The other browser shows the job, and what is typed there meanwhile is kept.
            opener = other.get_by_test_id("write-captions")
            opener.get_by_text("Writing captions:").wait_for()
            caption(other, "7.png").fill("typed in the other browser")
            saved(other, "7.png")
            until(lambda: written(other) >= 2, "the captions in the other browser")
            opener.click()
            there.get_by_text(f"of {IMAGES} captions written").wait_for()
            assert not faint_texts(other)
            there.get_by_role("button", name="Cancel").click()
            panel.get_by_text("Cancelled.").wait_for()
            assert was_not_reloaded(one) and was_not_reloaded(other)
            until(lambda: captions(one)["7.png"] == "typed in the other browser", "the text in the first browser")
            kept = {name: text for name, text in captions(one).items() if text}
            assert 3 <= len(kept) < IMAGES and captions(other) == captions(one)

            panel.get_by_role("button", name="Continue").click()
            there.get_by_role("button", name="Cancel").wait_for()
            asked = len(model.questions)
            server.stop(hard=True)
            caption(other, "7.png").fill("typed without a server")
            caption(one, "0.png").fill("also typed without one")
        until(lambda: len(model.questions) > asked, "the job goes on without the page")

        with serving(data, port=server.port) as server:
            for page, form in ((one, panel), (other, there)):
                finished = form.get_by_text(f"Finished. {IMAGES} of {IMAGES} captions written")
                finished.wait_for(state="attached")
                if form.is_hidden():  # the page has loaded itself again, after the end of the job
                    page.get_by_test_id("write-captions").click()
                finished.wait_for()
                page.get_by_test_id("unsaved-banner").wait_for(state="hidden")
            mine = {"0.png": "also typed without one", "7.png": "typed without a server"}
            for page, name in ((one, "0.png"), (other, "7.png")):
                assert captions(page)[name] == mine[name]
            for page in (one, other):  # a text that was typed in another browser after the job is seen after a reload
                page.reload()
                page.locator("body.hp-open").wait_for()
                until(lambda page=page: mine.items() <= captions(page).items(), f"the typed texts: {captions(page)}")
                until(lambda page=page: all(captions(page).values()), f"all captions: {captions(page)}")
            shown = captions(one)
            assert captions(other) == shown
            assert all(shown[name] == text for name, text in kept.items() if name not in mine), "none was written twice"
            assert all("a slow picture" in shown[f"{number}.png"] for number in range(1, IMAGES - 1))

            one.get_by_role("button", name="Start training").click()
            state_is(one, "completed")
        images = data / "datasets" / "bird"
        texts = {path.stem: path.read_text(encoding="utf-8").strip() for path in images.rglob("*.txt")}
        assert sorted(texts.values()) == sorted(shown.values())
        assert json.loads((data / "outputs" / "bird" / "status.json").read_text())["step"] == IMAGES
