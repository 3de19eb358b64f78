"""The Runs tab in a real browser: what a run made, what it does now, and what can be done with it."""

import contextlib
import json
import os
import re
import shutil
from datetime import UTC, datetime

import pytest
import ui_page as ui
from runs_helpers import sources
from ui_helpers import photos, serving, watched, write_incident, write_run

import runs
from jobs import queue


@pytest.fixture
def held():
    """Makes a run look watched until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda folder: stack.enter_context(watched(folder))


def change_status(folder, **values) -> None:
    """Replace status.json as the monitor does."""
    now = json.loads((folder / "status.json").read_text())
    (folder / ".status").write_text(json.dumps({**now, **values}))
    os.replace(folder / ".status", folder / "status.json")


def test_times_are_shown_in_the_browsers_time_zone(page, server):
    began = "2026-11-22T20:15:38.271Z"
    folder = write_run(server.data, "times", state="stopped", started_at=began, updated_at="2026-11-22T21:00:00Z")
    write_incident(folder, report=f"It hung at {began}.")
    (folder / "training.log").write_text(f"=== {began} attempt 1: train.sh, from the start\nend\n")
    ui.show_run(page, server, folder.name)
    page.get_by_text("Full report").click()
    page.locator("#log-fold button.label-wrap").click()
    for part in ("#run-incidents .hp-report", "#log-pane"):
        page.locator(part).get_by_text("23 Nov 2026, 05:15:38").wait_for()
    head = page.locator("#run-head")
    head.get_by_text("23 Nov, 5:15").wait_for()
    head.get_by_text("23 Nov, 6:00").wait_for()
    assert head.locator("time").first.get_attribute("datetime").startswith("2026-11-22T20:15:38")
    change_status(folder, updated_at="2026-11-22T22:00:00Z")  # the next tick draws the times again
    head.get_by_text("23 Nov, 7:00").wait_for()


def test_a_page_whose_server_is_gone_says_so_and_recovers_by_itself(browser, tmp_path, held):
    data = tmp_path / "data"
    folder = held(write_run(data, "lives on", last_progress_at=datetime.now(UTC).isoformat()))
    write_run(data, "newer")
    with serving(data) as server, ui.a_tab(browser) as page:
        ui.show_run(page, server, folder.name)
        ui.state_is(page, "running")
        assert page.get_by_test_id("state").inner_text() == "Training"
        server.stop(hard=True)
        banner = page.get_by_role("alert").get_by_text("Not connected", exact=True)
        banner.wait_for()
        page.get_by_test_id("state").get_by_text("Not connected", exact=True).wait_for()
        page.locator("#run-head").get_by_text("just now").wait_for(state="detached")
        page.locator(".toast-body").wait_for(state="attached")
        assert not page.locator(".toast-body").is_visible(), "Gradio's message would lie over ours"
        assert ui.faint_texts(page) == []
        change_status(folder, step=77)
        with ui.serving_again([page], data, server.port):
            banner.wait_for(state="detached")
            page.get_by_test_id("steps").get_by_text("77 of 100 steps").wait_for()
            assert page.get_by_test_id("run-name").inner_text() == "lives on"
            assert page.get_by_test_id("state").inner_text() == "Training"
            page.errors.clear()  # its requests to the dead server failed


def test_a_run_is_followed_after_a_look_at_another_tab_while_the_server_is_slow(page, server, held):
    folder = held(write_run(server.data, "followed", last_progress_at=datetime.now(UTC).isoformat()))
    ui.show_run(page, server, folder.name)
    slow_ms = [300]
    page.route("**/queue/join*", lambda route: page.wait_for_timeout(slow_ms[-1]) or route.continue_())
    for tab in ("New LoRA", "Runs"):
        page.get_by_role("tab", name=tab).click()
    page.wait_for_timeout(1000)  # the answers to both clicks
    change_status(folder, step=77)
    page.get_by_test_id("steps").get_by_text("77 of 100 steps").wait_for()
    slow_ms.append(0)


def test_stop_answers_at_once_and_says_why_it_fails(page, server, held):
    folder = held(write_run(server.data, "stops"))  # its train.sh is gone
    ui.show_run(page, server, folder.name)
    button = page.locator("#stop")
    button.get_by_text("Stop", exact=True).wait_for()
    page.locator("#manage-fold button.label-wrap").click()
    ui.press(page.locator("#delete-ok"), page.locator("#run-notice").get_by_text("stops runs or is being deleted"))
    ui.press(button, page.locator("#run-notice").get_by_text("train.sh is missing"))
    button.get_by_text("Stop", exact=True).wait_for()
    (folder / "train.sh").write_text("")
    ui.until(button.is_enabled, "it can be tried again")
    ui.two_ticks(page)  # so that none is under way that was sent before the button's new state
    with ui.hold(page, to="**/queue/join*"):
        button.click()
        button.get_by_text("Stopping…").wait_for()  # before the server has heard of it
        ui.until(button.is_disabled, "a second click is impossible")
        assert not (folder / "stop.request").exists()
    ui.until((folder / "stop.request").exists, "the monitor is asked")
    ui.two_ticks(page)  # before the monitor has answered
    assert button.inner_text() == "Stopping…" and button.is_disabled()
    change_status(folder, state="stopped")
    button.wait_for(state="hidden")
    with ui.hold(page, to="**/queue/join*"):
        ui.press(page.locator("#go"), page.locator("#run-notice").get_by_text("Starting…"))


def test_a_run_is_searched_renamed_and_deleted(page, server, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    images = server.data / "datasets"
    for name in ("tulip red", "tulip blue"):
        spec = runs.make({"name": name, "model": "tiny-flux", "backend": "diffusers", "trigger": "tok"})
        folder = runs.create(spec, sources(photos("coffee.png")))
        (folder / "status.json").write_text(json.dumps({"state": "stopped", "step": 3, "planned_steps": 9}))
    ui.show_run(page, server, write_run(server.data, "rose", state="failed").name)
    names = page.locator(".hp-run-name")
    ui.field(page, "run-search").fill("tulip RED")
    ui.until(lambda: names.all_inner_texts() == ["tulip red"], "the list shows the run that was searched")
    ui.press(page.locator(".hp-run"), page.get_by_test_id("run-name").get_by_text("tulip red"))

    manage = page.locator("#manage-fold")
    manage.locator("button.label-wrap").click()
    ui.field(page, "new-name").fill("tulip green")
    ui.press(page.locator("#rename-ok"), page.get_by_test_id("run-name").get_by_text("tulip green"))
    ui.field(page, "run-search").fill("tulip")
    ui.until(lambda: "tulip green" in names.all_inner_texts(), "the list shows the new name")
    assert (images / "tulip-red").is_dir()

    for _ in ("close", "open"):
        manage.locator("button.label-wrap").click()
    manage.get_by_text(re.compile("Delete the run 'tulip green'.*This frees ")).wait_for()
    colours = "selector => getComputedStyle(document.querySelector(selector)).backgroundColor"
    assert page.evaluate(colours, "#delete-ok") != page.evaluate(colours, "#rename-ok")
    ui.assert_accessible(page, "#manage-fold")
    assert (server.data / "outputs" / "tulip-red").is_dir()
    manage.get_by_label(re.compile("Also delete its data set: 1 image")).check()
    page.locator("#delete-ok").click()
    page.locator("#run-notice").get_by_text("Deleted 'tulip green'. This freed").wait_for()
    ui.until(lambda: names.all_inner_texts() == ["tulip blue"], "the list shows the run that is left")
    assert not (server.data / "outputs" / "tulip-red").exists() and not (images / "tulip-red").exists()
    assert (images / "tulip-blue").is_dir()
    ui.field(page, "run-search").fill("")


def test_a_run_that_is_renamed_or_deleted_elsewhere_is_not_replaced_by_another(page, server):
    """A click on Delete, asked for one run, deletes no other."""
    folder = write_run(server.data, "oak", state="stopped")
    other = write_run(server.data, "ash", state="stopped")
    ui.show_run(page, server, folder.name)
    folder.rename(folder.with_name("elm"))
    page.get_by_text("The run 'oak' was renamed or deleted").wait_for()
    assert page.get_by_test_id("run-name").count() == 0
    ui.press(page.locator("#run-list [data-run=elm]"), page.locator("[data-testid=run-name][data-run=elm]"))
    page.locator("#manage-fold button.label-wrap").click()
    page.locator("#manage-fold").get_by_text("Delete the run 'oak'").wait_for()  # and no longer that of an earlier test
    shutil.rmtree(folder.with_name("elm"))
    page.get_by_text("The run 'elm' was renamed or deleted").wait_for()
    page.locator("#delete-ok").wait_for(state="hidden")
    assert (other / "run.toml").is_file()


def test_what_a_fold_shows_of_the_run_before_is_gone_at_once(page, server):
    """Also where the fold is opened again, until the server has drawn it for the run that is selected now."""
    birch, beech = (write_run(server.data, name, state="stopped") for name in ("birch", "beech"))
    ui.show_run(page, server, birch.name)
    folds = {"manage": "Delete the run 'birch'", "publish": "This run has no LoRA yet", "checks": "Run it elsewhere"}
    for name, text in folds.items():
        page.locator(f"#{name}-fold button.label-wrap").first.click()
        page.locator(f"#{name}-fold").get_by_text(text).first.wait_for()
    ui.press(page.locator("#run-list [data-run=beech]"), page.locator("[data-testid=run-name][data-run=beech]"))
    with ui.hold(page, to="**/queue/join*") as asks:
        for name, text in folds.items():
            page.locator(f"#{name}-fold button.label-wrap").first.click()
            page.locator(f"#{name}-fold button.label-wrap.open").wait_for()
            assert not page.locator(f"#{name}-fold").get_by_text(text).first.is_visible()
        asks()
        assert not page.locator("#delete-ok").is_visible()
    page.locator("#manage-fold").get_by_text("Delete the run 'beech'").wait_for()
    ui.press(page.locator("#delete-ok"), page.locator("#run-notice").get_by_text("Deleted 'beech'"))
    assert (birch / "run.toml").is_file() and not beech.exists()


def test_new_lora_from_this_run_fills_in_the_form_and_its_message_is_in_view(page, server, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    spec = runs.make({"name": "copied", "model": "tiny-flux", "backend": "diffusers", "trigger": "tok", "epochs": 7})
    ui.show_run(page, server, runs.create(spec, sources(photos("coffee.png"), {"coffee.png": "tok, a cup"})).name)
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    page.get_by_role("button", name="New LoRA from this run").click()
    message = page.get_by_text("Copied the settings, images and captions of 'copied'")
    message.wait_for()
    in_view = "(e) => { const b = e.getBoundingClientRect(); return b.top >= 0 && b.bottom <= innerHeight; }"
    ui.until(lambda: message.evaluate(in_view), "the message is in view")
    ui.until(lambda: ui.captions(page) == {"coffee.png": "tok, a cup"}, "the image is copied")
    shown = ["7", "copied 2"]
    ui.until(lambda: [ui.field(page, key).input_value() for key in ("epochs", "name")] == shown, "the settings")
    page.locator(".hp-card textarea").fill("another cup")
    page.locator(".hp-card .hp-saved").get_by_text("saved", exact=True).wait_for()
    assert (server.data / "datasets" / "copied" / "coffee.txt").read_text() == "tok, a cup\n", "that run is unchanged"

    # The second half of a double click does not answer the question.
    ui.show_run(page, server, "copied")
    copy = page.get_by_role("button", name="New LoRA from this run")
    ui.press(copy, page.locator("#run-notice").get_by_text("1 image under New LoRA would be lost"))
    copy.hover()
    page.mouse.down(click_count=2)
    page.mouse.up(click_count=2)
    ui.two_ticks(page)
    assert ui.captions(page) == {"coffee.png": "another cup"} and not message.is_visible()


NUMBER, WAITING = 30, ("cat 03", "cat 04")
SEARCH = "#run-search textarea, #run-search input"


def box(page, selector: str) -> dict[str, float]:
    """Where an element is, in pixels."""
    place = page.locator(selector).first.bounding_box()
    assert place, f"{selector} is not shown"
    return place


def test_search_queue_and_list_are_all_there_with_30_runs(browser, data):
    with serving(data) as server, ui.a_tab(browser) as page:
        ui.open_page(page, server)
        ui.press(page.get_by_role("tab", name="Runs"), page.locator("#run-head").get_by_text("No run selected"))
        for number in range(NUMBER):
            write_run(data, f"cat {number:02}", state="completed", step=100)
        for name in WAITING:
            queue.insert(data / "outputs" / runs.slug(name))
        ui.show_run(page, server, runs.slug("cat 00"))
        page.locator("#log-fold").wait_for()
        page.locator(".hp-queue ol > li").first.wait_for()
        for width in (1024, 1920):
            page.set_viewport_size({"width": width, "height": 768})
            page.evaluate("window.scrollTo(0, 0)")
            side = box(page, ".hp-side")
            for part in (SEARCH, "#run-queue", ".hp-run"):
                place = box(page, part)
                assert place["height"] > 20 and place["width"] > 150, (width, part, place)
                assert place["x"] >= side["x"] - 1, (width, part)
                assert place["x"] + place["width"] <= side["x"] + side["width"] + 1, (width, part)
            assert page.locator("#run-list .hp-run").count() == NUMBER
            assert box(page, SEARCH)["y"] < 768, width
            last = page.locator("#run-list .hp-run").last
            last.scroll_into_view_if_needed()
            place = last.bounding_box()
            assert place and side["y"] - 1 <= place["y"] and place["y"] + place["height"] <= 769, width
        # The queue is changed by keyboard and by pointer.
        page.get_by_role("button", name="Move up: cat 04").press("Enter")
        page.locator(".hp-queue ol > li:first-child[data-run='cat-04']").wait_for()
        ui.has_focus(page, "aria-label", "Move up: cat 04")
        page.get_by_role("button", name="Remove from the queue: cat 03").click()
        page.locator(".hp-queue li[data-run='cat-03']").wait_for(state="detached")
        assert [one.run for one in queue.read().entries] == ["cat-04"]
        queue.insert(write_run(data, "dog", state="stopped"))
        ui.show_run(page, server, "dog")
        page.get_by_role("button", name="Leave the queue").press("Enter")
        ui.has_focus(page, "data-do", "queue")  # in place of the button that is gone
        # A press is not lost while the answer to the one before is awaited.
        with ui.hold(page, '"cat-05"', "**/queue/join*", first=True) as asks:
            page.locator(".hp-run[data-run=cat-05]").click()
            asks()
            ui.press(page.locator(".hp-run[data-run=cat-06]"), page.locator("[data-testid=run-name][data-run=cat-06]"))
        # A long queue leaves room for the list, which on a phone is below it, as wide as the page.
        for number in range(10, 22):
            queue.insert(data / "outputs" / f"cat-{number}")
        page.locator(".hp-queue ol > li").nth(12).wait_for(state="attached")
        assert box(page, ".hp-queue")["height"] < 400
        page.set_viewport_size({"width": 390, "height": 500})
        assert page.locator(".hp-side").evaluate("(side) => side.scrollHeight <= side.clientHeight")
        assert box(page, ".hp-queue")["width"] == box(page, "#run-list")["width"]


def test_a_hidden_page_asks_the_server_nothing_until_it_is_shown_again(browser, data):
    write_run(data, "cat", state="completed", step=100)
    with serving(data) as server, ui.a_tab(browser) as page:
        ui.show_run(page, server, runs.slug("cat"))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/gradio_api/" in request.url else None)

        def shown(yes: bool) -> None:
            page.evaluate(
                """(yes) => { Object.defineProperty(document, "hidden", { value: !yes, configurable: true });
                document.dispatchEvent(new Event("visibilitychange")); }""",
                yes,
            )

        def asks(seconds: float = 3.0) -> bool:
            asked.clear()
            page.wait_for_timeout(1000 * seconds)
            return bool(asked)

        ui.until(asks, "the page reads the run each second")
        shown(False)
        page.wait_for_timeout(1500)  # what was asked before that is answered
        assert not asks(), asked
        shown(True)
        ui.until(asks, "the page reads the run again")
