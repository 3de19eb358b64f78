"""The page in a real browser: drops and typed text are kept, errors are shown, a run is monitored to its end."""

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from draft_helpers import stored_forms
from PIL import Image
from safetensors import safe_open
from ui_helpers import PACED, photos, serving, small_disk, write_incident, write_run
from ui_page import (
    RUN_S,
    a_tab,
    caption,
    captions,
    choose_tiny,
    drop,
    faint_texts,
    field,
    has_focus,
    nameless_controls,
    open_page,
    reaches,
    saved,
    serious,
    set_up_run,
    state_is,
    step_of,
    until,
)

from ui.run import cards

HOSTILE = 'a "cat" <img src=x onerror="document.title=\'gone\'"> ${7*7} {{7*7}} \'é💥'


@pytest.mark.journey
def test_from_images_and_captions_to_a_lora(tab, data, tmp_path):
    with serving(data) as server:
        open_page(tab, server)
        assert serious(tab) == []
        folder = set_up_run(tab, server, "first", repeats="1", epochs="1")
        assert (data / "datasets" / "first" / "chelsea.txt").read_text() == "tok, a tabby cat\n"
        state_is(tab, "completed")
        assert step_of(tab) == 4
        with tab.expect_download() as download:
            tab.get_by_test_id("download").click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
    assert path.name == "first.safetensors" and path.read_bytes() == (folder / path.name).read_bytes()
    with safe_open(path, framework="numpy") as lora:
        assert any("lora" in key for key in lora.keys())  # noqa: SIM118


def test_captions_stay_when_images_come_go_and_the_page_is_reloaded(tab, server, tmp_path):
    open_page(tab, server)
    text = tmp_path / "chelsea.txt"
    text.write_text("a tabby cat", encoding="utf-8")
    drop(tab, *photos("astronaut.png", "chelsea.png", "coffee.png"), text, count=3)
    assert captions(tab) == {"astronaut.png": "", "chelsea.png": "a tabby cat", "coffee.png": ""}
    warning = tab.locator(".hp-card[data-file='astronaut.png'] .hp-warnings").get_by_text("No caption")
    warning.wait_for()
    for typed, shown in (("an astronaut", 0), ("", 1)):  # what the card says follows what is typed
        caption(tab, "astronaut.png").fill(typed)
        saved(tab, "astronaut.png")
        caption(tab, "astronaut.png").blur()
        until(lambda shown=shown: warning.count() == shown, f"what the card says of the caption {typed!r}")
    caption(tab, "coffee.png").fill(HOSTILE)
    drop(tab, *photos("rocket.jpg"), count=4)  # while the caption is still being saved
    assert captions(tab)["coffee.png"] == HOSTILE
    saved(tab, "coffee.png")
    tab.get_by_label("Remove astronaut.png").click()
    tab.get_by_test_id("image-count").get_by_text("3 images").wait_for()
    expected = {"chelsea.png": "a tabby cat", "coffee.png": HOSTILE, "rocket.jpg": ""}
    assert captions(tab) == expected
    field(tab, "name").fill(HOSTILE)
    field(tab, "trigger").fill("tok")
    tab.get_by_role("button", name="Add trigger word to all captions").click()
    tab.wait_for_function(
        "() => [...document.querySelectorAll('.hp-card textarea')].every(t => t.value.startsWith('tok'))"
    )
    expected = {"chelsea.png": "tok, a tabby cat", "coffee.png": "tok, " + HOSTILE, "rocket.jpg": "tok"}
    assert captions(tab) == expected
    tab.locator("#plan").get_by_text("3 images", exact=False).wait_for()
    until(lambda: any(form.get("trigger") == "tok" for form in stored_forms(server.data)), "fields are stored")
    tab.reload()
    tab.get_by_test_id("image-count").get_by_text("3 images").wait_for()
    assert captions(tab) == expected
    assert field(tab, "name").input_value() == HOSTILE and field(tab, "trigger").input_value() == "tok"
    assert tab.title() == "Hangproof"


def test_the_form_waits_for_the_draft_and_keeps_what_is_chosen_before_an_answer(tab, server):
    held, answered = [], []
    tab.route("**/queue/join*", lambda route: route.continue_() if answered else held.append(route))

    def answer() -> None:
        answered.append(True)
        while held:
            held.pop().continue_()

    tab.goto(server.url)
    tab.locator("#start").wait_for()
    until(lambda: tab.wait_for_timeout(50) or held, "the page asks for its draft")
    pointer_events = "getComputedStyle(document.querySelector('.hp-step')).pointerEvents"
    assert tab.evaluate(pointer_events) == "none"
    answer()
    tab.locator("body.hp-open").wait_for()
    assert tab.evaluate(pointer_events) == "auto"

    answered.clear()
    choose_tiny(tab)
    until(lambda: tab.wait_for_timeout(50) or held, "the page sends the model")
    tab.get_by_label("kohya's sd-scripts").click()
    answer()
    until(lambda: tab.wait_for_timeout(50) or field(tab, "resolution").input_value() == "64", "the model's resolution")
    tab.wait_for_timeout(300)
    assert tab.get_by_label("kohya's sd-scripts").is_checked()


def test_pages_of_cards_keep_what_was_typed_and_a_late_answer_does_not_turn_them_back(tab, server, tmp_path):
    """Another tab changes a caption, and the list that is asked for because of it arrives after the next page."""
    open_page(tab, server)
    for n in range(13):
        Image.new("RGB", (64 + n, 64), (n * 15, 90, 120)).save(tmp_path / f"picture {n:02}.png")
    drop(tab, *sorted(tmp_path.glob("*.png")), count=13)
    tab.get_by_text("Page 1 of 2").wait_for()
    caption(tab, "picture-01.png").fill("typed")
    tab.get_by_role("button", name="Next ›").click()  # at once: the next page waits for the caption
    tab.get_by_text("Page 2 of 2").wait_for()
    assert list(captions(tab)) == ["picture-12.png"]
    tab.get_by_role("button", name="‹ Previous").click()
    tab.get_by_text("Page 1 of 2").wait_for()
    assert captions(tab)["picture-01.png"] == "typed"

    other = tab.context.new_page()
    open_page(other, server)
    held, pages = [], []

    def hold(route):
        sent = route.request.post_data_json
        listing = sent["fn_name"] == "list_images"
        if listing and sent["data"]["page"] == 0:
            held.append(route)
        else:
            pages.extend([sent["data"]["page"]] if listing else [])
            route.continue_()

    tab.route("**/component_server/", hold)
    caption(other, "picture-00.png").fill("from the other tab")
    saved(other, "picture-00.png")
    until(lambda: tab.wait_for_timeout(50) or held, "the tab asks for its page again")
    tab.get_by_role("button", name="Next ›").click()
    tab.get_by_text("Page 2 of 2").wait_for()
    held.pop(0).continue_()
    until(
        lambda: tab.wait_for_timeout(50) or pages == [1, 1], "the list of the page that is shown is asked for instead"
    )
    tab.wait_for_timeout(300)
    assert list(captions(tab)) == ["picture-12.png"]
    tab.unroute("**/component_server/")
    tab.get_by_role("button", name="‹ Previous").click()
    tab.get_by_text("Page 1 of 2").wait_for()
    assert captions(tab)["picture-00.png"] == "from the other tab"


def test_each_error_is_shown_beside_what_is_wrong_and_nothing_is_lost(tab, server, tmp_path):
    open_page(tab, server)
    field(tab, "trigger").fill("tok")
    tab.locator("#start").click()
    problem = tab.locator("#problem")
    problem.get_by_text("Name: Give your LoRA a name").wait_for()
    assert "Images: Add at least one image" in problem.inner_text()
    tab.locator("#name .hp-field-error").get_by_text("Give your LoRA a name").wait_for()

    (tmp_path / "fake.png").write_text("I am text")
    Image.new("1", (30_000, 30_000)).save(tmp_path / "huge.png")
    drop(tab, tmp_path / "fake.png", tmp_path / "huge.png", *photos("coffee.png"), count=1)
    notes = tab.locator(".hp-notes")
    notes.get_by_text(re.compile("fake.png: not a", re.IGNORECASE)).wait_for()
    assert re.search("huge.png: .*too large", notes.inner_text())
    caption(tab, "coffee.png").fill("a cup")

    field(tab, "epochs").fill("0")
    error = tab.locator("#epochs .hp-field-error")
    error.get_by_text("1").wait_for()
    assert field(tab, "epochs").get_attribute("aria-invalid") == "true"
    assert field(tab, "epochs").get_attribute("aria-describedby") == error.get_attribute("id")
    field(tab, "name").fill("💥 ///")
    tab.locator("#start").click()
    problem.get_by_text("letter or digit").wait_for()
    assert len(problem.locator("li").all_inner_texts()) >= 2 and field(tab, "epochs").input_value() == "0"
    field(tab, "name").fill("no model")
    tab.locator("#name .hp-field-error").wait_for(state="detached")
    field(tab, "epochs").fill("2")
    error.wait_for(state="detached")
    assert field(tab, "epochs").get_attribute("aria-invalid") is None

    tab.get_by_label("kohya's sd-scripts").click()
    tab.locator("#start").click()
    problem.get_by_text("flux1-dev.safetensors").first.wait_for()
    assert field(tab, "trigger").input_value() == "tok" and captions(tab) == {"coffee.png": "a cup"}
    assert not (server.data / "outputs" / "no-model").exists()


def test_with_the_keyboard_alone(tab, server, tmp_path):
    choosers = []
    tab.on("filechooser", lambda chooser: choosers.append(chooser))
    open_page(tab, server)
    field(tab, "name").focus()
    tab.keyboard.type("by hand")
    for key in ("trigger", "model"):
        tab.keyboard.press("Tab")
        assert tab.evaluate(f"document.querySelector('#{key}').contains(document.activeElement)"), key
    tab.locator(".hp-drop").focus()
    tab.keyboard.press("Enter")
    until(lambda: tab.wait_for_timeout(50) or choosers, "the file chooser opens")
    choosers[0].set_files([str(path) for path in photos("coffee.png", "rocket.jpg")])
    tab.get_by_test_id("image-count").get_by_text("2 images").wait_for()
    caption(tab, "coffee.png").focus()
    tab.keyboard.type("a cup")
    tab.keyboard.press("Tab")
    saved(tab, "coffee.png")
    tab.get_by_label("Remove coffee.png").focus()
    tab.keyboard.press("Enter")
    tab.get_by_test_id("image-count").get_by_text("1 image").wait_for()
    # the focused button was removed; the focus is on the next image's button, not at the top of the page
    has_focus(tab, "aria-label", "Remove rocket.jpg")


def test_every_part_is_readable_and_named_in_a_narrow_window(browser, tmp_path):
    width = 400
    data = tmp_path / "data"
    names = ["running", "a_very_long_name_without_any_break_" * 3, *(f"run {n}" for n in range(12))]
    for state, name in zip([*cards.STATES, "running"], names, strict=False):
        folder = write_run(data, name, state=state, reason="no_break_" * 30, checkpoint={"step": 30}, loss=0.1)
    write_incident(folder, report="# Hang\n\n`" + "x" * 300 + "`", explanation="why " * 40, detect_s=2.0)
    (folder / "training.log").write_text("y" * 500)
    (folder / f"{folder.name}.safetensors").write_bytes(b"x")
    many = []
    for n in range(40):
        many.append(tmp_path / f"{'a-long-name-' * 8 if n == 0 else ''}{n:03}.png")
        Image.new("RGB", (64 + n, 64), (n * 5, 90, 120)).save(many[-1])

    def fits(page, where: str) -> None:
        assert page.evaluate("document.documentElement.scrollWidth") <= width, where
        assert faint_texts(page) == [] and nameless_controls(page) == [], where

    with serving(data) as server, a_tab(browser, width=width) as page:
        open_page(page, server)
        page.add_style_tag(content="* { transition: none !important }")  # no colour between two others
        fits(page, "the empty form")
        drop(page, *many, count=40)
        page.get_by_text("Page 1 of 4").wait_for()
        page.get_by_text("More settings").click()
        page.get_by_text("All trainer options").click()
        page.locator("[data-flag=caption_prefix] button").click()
        field(page, "learning_rate").fill("very " * 30)
        page.locator("#learning_rate .hp-field-error").wait_for()
        page.locator("#start").click()
        page.locator("#problem .hp-bad").wait_for()
        fits(page, "the form with 40 images and errors, the mouse on Start")
        page.get_by_role("tab", name="Runs").click()
        for row in page.locator(".hp-run").all():
            row.click()
            page.locator(f".hp-here[data-run='{row.get_attribute('data-run')}']").wait_for()
            fits(page, row.get_attribute("data-run"))


def test_a_full_disk_during_an_upload_is_reported_and_loses_nothing(tab, tmp_path):
    with small_disk(tmp_path, "3m") as disk, serving(disk) as server:
        open_page(tab, server)
        drop(tab, *photos("coins.png"), count=1)
        caption(tab, "coins.png").fill("old coins")
        saved(tab, "coins.png")
        many = photos(
            "astronaut.png", "motorcycle_left.png", "motorcycle_right.png", "hubble_deep_field.jpg", "ihc.png"
        )
        tab.get_by_test_id("image-picker").set_input_files([str(p) for p in many])
        tab.locator(".hp-notes").get_by_text("disk is full").wait_for()
        assert captions(tab)["coins.png"] == "old coins"
        assert "Drop images or folders here" in tab.locator(".hp-drop").inner_text()


def trainer_of(folder: Path) -> psutil.Process:
    """The training process, not the shell or the launcher that started it."""
    [pid] = json.loads((folder / "status.json").read_text(encoding="utf-8"))["trainer_pids"]
    found = psutil.Process(pid)
    assert found.environ()["HANGPROOF_RUN"] == str(folder) and "trainer" in found.cmdline()
    return found


@pytest.mark.timeout(1200)
def test_through_a_hang_to_a_lora_while_the_server_is_killed(tab, data):
    with serving(data, **PACED) as server:
        folder = set_up_run(tab, server, "chelsea", repeats="2", epochs="3", save_every_n_steps="6")
        state_is(tab, "running")
        reaches(tab, 2)
        before = step_of(tab)
        reaches(tab, before + 3)  # the page updates without a click
        trainer = trainer_of(folder)
        os.kill(trainer.pid, signal.SIGSTOP)
        server.stop(hard=True)  # and the page's server dies; the monitor does not need it
    with serving(data, port=server.port, **PACED):
        incident = tab.get_by_test_id("incident")
        incident.wait_for(timeout=RUN_S * 1000)  # the open page reconnects
        tab.errors.clear()  # its requests to the dead server failed
        assert "Hung" in incident.inner_text()  # after a step, or in a save that the signal hit
        until(lambda: tab.get_by_text("Recovered in").count() == 1, "the incident shows the recovery", RUN_S)
        assert not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE  # killed, perhaps not reaped yet
        state_is(tab, "completed")
        assert step_of(tab) == 24
        tab.locator("#run-charts").scroll_into_view_if_needed()  # a chart is drawn while it is in view
        until(lambda: tab.locator("#run-charts .hp-mark").count() >= 1, "the chart marks the restart")
    assert (folder / "chelsea.safetensors").is_file()
