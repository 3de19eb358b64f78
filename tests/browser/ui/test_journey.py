"""The page in a real browser: drops and typed text are kept, errors are shown, a run is monitored to its end."""

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from draft_helpers import stored_forms
from PIL import Image
from ui_helpers import kill_runs, photos, serving, small_disk, write_incident, write_run
from ui_page import (
    PATIENCE_S,
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
    state_is,
    step_of,
    until,
)

from ui.run import cards

PACED = {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_PACE_S": "0.75"}
HOSTILE = 'a "cat" <img src=x onerror="document.title=\'gone\'"> ${7*7} {{7*7}} \'é💥'


def test_captions_stay_when_images_come_go_and_the_page_is_reloaded(tab, server, tmp_path):
    open_page(tab, server)
    text = tmp_path / "chelsea.txt"
    text.write_text("a tabby cat", encoding="utf-8")
    drop(tab, *photos("astronaut.png", "chelsea.png", "coffee.png"), text, count=3)
    assert captions(tab) == {"astronaut.png": "", "chelsea.png": "a tabby cat", "coffee.png": ""}
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


def test_the_form_is_disabled_until_the_draft_is_loaded(tab, server):
    tab.route("**/queue/join*", lambda route: (time.sleep(1.5), route.continue_()))
    tab.goto(server.url)
    tab.locator("#start").wait_for()
    pointer_events = "getComputedStyle(document.querySelector('.hp-step')).pointerEvents"
    assert tab.evaluate(pointer_events) == "none"
    tab.locator("body.hp-open").wait_for()
    assert tab.evaluate(pointer_events) == "auto"
    tab.unroute("**/queue/join*")


def test_a_trainer_chosen_while_the_model_loads_stays(tab, server):
    open_page(tab, server)
    held = []
    tab.route("**/queue/join*", lambda route: held.append(route))
    choose_tiny(tab)
    until(lambda: tab.wait_for_timeout(50) or held, "the page sends the model")
    tab.get_by_label("kohya's sd-scripts").click()
    for route in held:
        route.continue_()
    tab.unroute("**/queue/join*")
    until(lambda: tab.wait_for_timeout(50) or field(tab, "resolution").input_value() == "64", "the model's resolution")
    tab.wait_for_timeout(300)
    assert tab.get_by_label("kohya's sd-scripts").is_checked()


def test_pages_of_cards_keep_what_was_typed(tab, server, tmp_path):
    open_page(tab, server)
    many = []
    for n in range(14):
        path = tmp_path / f"picture {n:02}.png"
        Image.new("RGB", (64 + n, 64), (n * 15, 90, 120)).save(path)
        many.append(path)
    drop(tab, *many, count=14)
    tab.get_by_text("Page 1 of 2").wait_for()
    caption(tab, "picture-00.png").fill("the first")
    tab.get_by_role("button", name="Next ›").click()  # at once: the next page waits for the caption
    tab.get_by_text("Page 2 of 2").wait_for()
    assert list(captions(tab)) == ["picture-12.png", "picture-13.png"]
    tab.get_by_role("button", name="‹ Previous").click()
    tab.get_by_text("Page 1 of 2").wait_for()
    assert captions(tab)["picture-00.png"] == "the first"


def test_a_late_answer_does_not_turn_the_page_back(tab, server, tmp_path):
    """Another tab changes a caption, and the list that is asked for because of it arrives after the next page."""
    open_page(tab, server)
    for n in range(13):
        Image.new("RGB", (64 + n, 64), (n * 15, 90, 120)).save(tmp_path / f"picture {n:02}.png")
    drop(tab, *sorted(tmp_path.glob("*.png")), count=13)
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


def test_bad_files_are_reported_and_the_others_are_added(tab, server, tmp_path):
    open_page(tab, server)
    fake = tmp_path / "fake.png"
    fake.write_text("I am text")
    huge = tmp_path / "huge.png"
    Image.new("1", (30_000, 30_000)).save(huge)
    drop(tab, fake, huge, *photos("coffee.png"), count=1)
    notes = tab.locator(".hp-notes")
    notes.get_by_text(re.compile("fake.png: not a", re.IGNORECASE)).wait_for()
    assert re.search("huge.png: .*too large", notes.inner_text())
    assert list(captions(tab)) == ["coffee.png"]


def test_a_failed_start_shows_all_errors_and_loses_nothing(tab, server):
    open_page(tab, server)
    field(tab, "trigger").fill("tok")
    tab.locator("#start").click()
    problem = tab.locator("#problem")
    problem.get_by_text("Name: Give your LoRA a name").wait_for()
    assert "Images: Add at least one image" in problem.inner_text()
    field(tab, "name").fill("💥 ///")
    drop(tab, *photos("coffee.png"), count=1)
    caption(tab, "coffee.png").fill("a cup")
    tab.locator("#start").click()
    problem.get_by_text("letter or digit").wait_for()
    field(tab, "name").fill("no model")
    tab.get_by_label("kohya's sd-scripts").click()
    tab.locator("#start").click()
    problem.get_by_text("flux1-dev.safetensors").first.wait_for()
    assert field(tab, "trigger").input_value() == "tok" and captions(tab) == {"coffee.png": "a cup"}
    assert not (server.data / "outputs" / "no-model").exists()


def test_an_error_is_shown_next_to_its_field_until_it_is_fixed(tab, server):
    open_page(tab, server)
    drop(tab, *photos("coffee.png"), count=1)
    field(tab, "epochs").fill("0")
    error = tab.locator("#epochs .hp-field-error")
    error.get_by_text("1").wait_for()
    assert field(tab, "epochs").get_attribute("aria-invalid") == "true"
    assert field(tab, "epochs").get_attribute("aria-describedby") == error.get_attribute("id")
    assert tab.locator(".hp-field-error").count() == 1  # a missing name is an error only at the start
    tab.locator("#start").click()
    tab.locator("#name .hp-field-error").get_by_text("Give your LoRA a name").wait_for()
    assert len(tab.locator("#problem li").all_inner_texts()) >= 2 and field(tab, "epochs").input_value() == "0"
    field(tab, "name").fill("a name")
    tab.locator("#name .hp-field-error").wait_for(state="detached")
    field(tab, "epochs").fill("2")
    error.wait_for(state="detached")
    assert field(tab, "epochs").get_attribute("aria-invalid") is None


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


@pytest.mark.parametrize(
    "width, scheme",
    [(400, "light"), *(pytest.param(1280, scheme, marks=pytest.mark.long) for scheme in ("dark", "light"))],
)
def test_every_part_is_readable_and_named_in_a_narrow_window_and_in_dark_mode(browser, tmp_path, width, scheme):
    data = tmp_path / "data"
    names = ["running", "a_very_long_name_without_any_break_" * 3, *(f"run {n}" for n in range(12))]
    for state, name in zip([*cards.STATES, "running"], names, strict=False):
        folder = write_run(data, name, state=state, reason="no_break_" * 30, checkpoint={"step": 30}, loss=0.1)
    write_incident(folder, report="# Hang\n\n`" + "x" * 300 + "`", explanation="why " * 40, detect_s=2.0)
    (folder / "training.log").write_text("y" * 500)
    (folder / f"{folder.name}.safetensors").write_bytes(b"x")
    many = []
    for n in range(200):
        many.append(tmp_path / f"{'a-long-name-' * 8 if n == 0 else ''}{n:03}.png")
        Image.new("RGB", (64 + n, 64), (n, 90, 120)).save(many[-1])

    def fits(page, where: str) -> None:
        assert page.evaluate("document.documentElement.scrollWidth") <= width, where
        assert faint_texts(page) == [] and nameless_controls(page) == [], where

    with serving(data) as server, a_tab(browser, width=width, color_scheme=scheme) as page:
        open_page(page, server)
        page.add_style_tag(content="* { transition: none !important }")  # no colour between two others
        fits(page, "the empty form")
        drop(page, *many, count=200)
        page.get_by_text("Page 1 of 17").wait_for()
        page.get_by_text("More settings").click()
        page.get_by_text("All trainer options").click()
        page.locator("[data-flag=caption_prefix] button").click()
        field(page, "learning_rate").fill("very " * 30)
        page.locator("#learning_rate .hp-field-error").wait_for()
        page.locator("#start").click()
        page.locator("#problem .hp-bad").wait_for()
        fits(page, "the form with 200 images and errors, the mouse on Start")
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


def test_it_works_the_same_with_a_password(browser, tmp_path):
    with serving(tmp_path / "data", "--auth", "me:secret") as server:
        page = browser.new_context().new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(server.url)
        page.get_by_label("User name").fill("me")
        page.get_by_label("Password").fill("secret")
        page.get_by_role("button", name="Log in").click()
        page.locator("body.hp-open").wait_for()
        drop(page, *photos("coffee.png"), count=1)
        caption(page, "coffee.png").fill("a cup")
        saved(page, "coffee.png")
        page.wait_for_function("() => [...document.images].every(i => i.complete && i.naturalWidth)")
        page.context.close()


# A run, from photographs to a file --------------------------------------------------------------------------------


@pytest.fixture
def runs_data(tmp_path):
    """A data folder whose runs are killed after the test."""
    yield tmp_path / "data"
    kill_runs(tmp_path / "data")


def trainer_of(folder: Path) -> psutil.Process:
    """The training process, not the shell or the launcher that started it."""
    [pid] = json.loads((folder / "status.json").read_text(encoding="utf-8"))["trainer_pids"]
    found = psutil.Process(pid)
    assert found.environ()["HANGPROOF_RUN"] == str(folder) and "trainer" in found.cmdline()
    return found


def set_up_run(page, server, name: str, **fields: str) -> Path:
    """Fill in the three steps with photographs and start. Returns the run's folder."""
    open_page(page, server)
    field(page, "name").fill(name)
    field(page, "trigger").fill("tok")
    choose_tiny(page)
    page.get_by_text("More settings").click()
    for key, value in fields.items():
        field(page, key).fill(value)
    drop(page, *photos("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"), count=4)
    caption(page, "chelsea.png").fill("tok, a tabby cat")
    page.locator("#start").click()  # at once: the run must contain the caption typed last
    shown = page.get_by_test_id("run-name").get_by_text(name).or_(page.locator("#problem .hp-bad, #run-notice .hp-bad"))
    shown.first.wait_for()
    assert page.locator(".hp-bad:visible").all_inner_texts() == []  # the form, now hidden, says that the name is used
    return server.data / "outputs" / name


@pytest.mark.timeout(1200)
def test_from_photographs_through_a_hang_to_a_lora(tab, runs_data, tmp_path):
    data = runs_data
    with serving(data, **PACED) as server:
        folder = set_up_run(tab, server, "chelsea", repeats="2", epochs="6", save_every_n_steps="6")
        assert (data / "datasets" / "chelsea" / "chelsea.txt").read_text() == "tok, a tabby cat\n"
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
        until(
            lambda: tab.get_by_text("Recovered in").count() == 1,
            "the incident shows the recovery",
            RUN_S,
        )
        assert not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE  # killed, perhaps not reaped yet
        state_is(tab, "completed")
        assert step_of(tab) == 48
        tab.locator("#run-charts").scroll_into_view_if_needed()  # a chart is drawn while it is in view
        until(lambda: tab.locator("#run-charts .hp-mark").count() >= 1, "the chart marks the restart")
        with tab.expect_download() as download:
            tab.get_by_test_id("download").click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
    assert path.name == "chelsea.safetensors"
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as lora:
        assert any("lora" in key for key in lora.keys())  # noqa: SIM118
    assert path.read_bytes() == (folder / "chelsea.safetensors").read_bytes()


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_a_run_is_monitored_stopped_and_resumed_from_its_checkpoint(tab, runs_data):
    # Slow, so that a page on a busy machine has a minute between step 2 and the end; resumed at full speed.
    with serving(runs_data, **{**PACED, "HANGPROOF_PACE_S": "2.5"}) as server:
        folder = set_up_run(tab, server, "stopped", repeats="1", epochs="6", save_every_n_steps="20")
        reaches(tab, 2)
        other = tab.context.new_page()
        other.goto(server.url)  # a new page shows the running run
        other.get_by_test_id("run-name").get_by_text("stopped").wait_for()
        other.close()
        tab.locator("#stop").click()
        state_is(tab, "stopped")
        done = step_of(tab)
        assert 2 <= done < 24
        tab.goto("about:blank")  # an open page would reconnect during the next lines
    with serving(runs_data, port=server.port):
        tab.goto(f"{server.url}?run=stopped")
        tab.locator("#go").get_by_text("Resume").click()
        state_is(tab, "completed")
        tab.errors.clear()
        assert step_of(tab) == 24

        tab.locator("#go").get_by_text("Train longer").click()
        tab.locator("#run-notice").get_by_text(
            "Total epochs: Already trained for 6 epochs; enter a larger number"
        ).wait_for()
        field(tab, "total").fill("8")
        tab.locator("#go").get_by_text("Train longer").click()
        tab.get_by_test_id("steps").get_by_text("32 of 32 steps").wait_for(timeout=RUN_S * 1000)
        state_is(tab, "completed")
        steps = [int(s) for s in re.findall(r'"step": ?(\d+)', (folder / "metrics.jsonl").read_text())]
        assert steps == list(
            range(1, 33)
        )  # none repeated: it continued from the stop's checkpoint, and then from its end

        tab.get_by_role("button", name="New LoRA from this run").click()
        tab.locator("#new-note").get_by_text("Copied the settings, images and captions of 'stopped'").wait_for()
        assert [field(tab, key).input_value() for key in ("name", "trigger", "epochs")] == ["stopped 2", "tok", "8"]
        assert captions(tab)["chelsea.png"] == "tok, a tabby cat" and len(captions(tab)) == 4
        caption(tab, "chelsea.png").fill("tok, somebody's cat")
        saved(tab, "chelsea.png")
    assert (runs_data / "datasets" / "stopped" / "chelsea.txt").read_text() == "tok, a tabby cat\n"
