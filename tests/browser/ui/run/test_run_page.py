"""The Runs tab in a real browser: what a run made, what it does now, and what can be done with it."""

import json
import os
import re
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from ui_helpers import lora_file, photos, serving, write_incident, write_run
from ui_page import a_tab, captions, faint_texts, field, nameless_controls, state_is, until

import presets
import runs
from monitor.process.locks import LOCK, Lock

PROMPTS = "a cat --w 64 --d 42\na dog <img src=x onerror=alert(1)> --w 64\n"
FOCUSED = "document.activeElement"


@pytest.fixture
def held():
    """Makes a run look watched: holds the lock of its monitor."""
    locks = []

    def hold(folder: Path) -> Path:
        lock = Lock(folder / LOCK)
        assert lock.acquire()
        locks.append(lock)
        return folder

    yield hold
    for lock in locks:
        lock.release()


def show(page, server, folder: Path) -> None:
    """Open the page with this run selected."""
    page.goto(f"{server.url}?run={folder.name}")
    page.locator("body.hp-open").wait_for()
    page.locator(f".hp-here[data-run='{folder.name}']").wait_for()


def samples(folder: Path, *steps: int, prompts: int = 2) -> None:
    (folder / "sample").mkdir(exist_ok=True)
    (folder / "sample_prompts.txt").write_text(PROMPTS, encoding="utf-8")
    for step in steps:
        for prompt in range(prompts):
            name = f"{folder.name}_{step:06}_{prompt:02}_20260101120000_42.png"
            shutil.copy(photos("coffee.png")[0], folder / "sample" / name)


def change_status(folder: Path, **values) -> None:
    """Replace status.json as the monitor does."""
    now = json.loads((folder / "status.json").read_text())
    (folder / ".status").write_text(json.dumps({**now, **values}))
    os.replace(folder / ".status", folder / "status.json")


@pytest.mark.parametrize("state", ["running", "completed"])
def test_every_saved_lora_has_its_step_its_samples_and_a_download(tab, server, held, state):
    folder = write_run(server.data, f"loras {state}", state=state)
    if state == "running":
        held(folder)
    for step in (20, 100):
        lora_file(folder / f"{folder.name}-step{step:08}.safetensors", step)
    lora_file(folder / f"{folder.name}-000003.safetensors", 60, 3)
    whole = lora_file(folder / f"{folder.name}-step00000120.safetensors", 120)
    whole.write_bytes(whole.read_bytes()[:-4])  # being written
    samples(folder, 20, 100)
    if state == "completed":
        lora_file(folder / f"{folder.name}.safetensors", 140)
    show(tab, server, folder)
    rows = tab.get_by_test_id("lora")
    rows.first.wait_for()
    titles = [text.splitlines()[0] for text in rows.all_inner_texts()]
    assert titles == ["Final LoRA · step 140"] * (state == "completed") + ["Step 100", "Step 60", "Step 20"]
    assert rows.filter(has_text="Step 100").locator("img").count() == 2
    row = rows.filter(has_text="Step 20")
    with tab.expect_download() as download:
        row.get_by_test_id("download-numbered").click()
    assert download.value.suggested_filename == f"{folder.name}-step00000020.safetensors"
    assert download.value.path().read_bytes() == (folder / download.value.suggested_filename).read_bytes()
    lora_file(folder / f"{folder.name}-step00000140.safetensors", 141)  # it appears without a click
    tab.get_by_test_id("lora").filter(has_text="Step 140").wait_for()


def test_times_are_shown_in_the_browsers_time_zone(browser, server):
    began = "2026-11-22T20:15:38.271Z"
    folder = write_run(server.data, "times", state="stopped", started_at=began, updated_at="2026-11-22T21:00:00Z")
    write_incident(folder, report=f"It hung at {began}.")
    (folder / "training.log").write_text(f"=== {began} attempt 1: train.sh, from the start\nend\n")
    with a_tab(browser, timezone_id="Asia/Tokyo", locale="en-GB") as page:
        show(page, server, folder)
        page.get_by_text("Full report").click()
        for part in ("#run-incidents .hp-report", "#run-log"):
            page.locator(part).get_by_text("23 Nov 2026, 05:15:38").wait_for()
        page.locator("#run-head").get_by_text("23 Nov, 5:15").wait_for()
        page.locator("#run-head").get_by_text("23 Nov, 6:00").wait_for()
        time_of_start = page.locator("#run-head time").first
        assert time_of_start.get_attribute("datetime").startswith("2026-11-22T20:15:38")
        change_status(folder, updated_at="2026-11-22T22:00:00Z")  # the next tick draws the times again
        page.locator("#run-head").get_by_text("23 Nov, 7:00").wait_for()


def test_without_a_step_there_is_no_speed_and_without_a_gpu_no_queue_for_one(tab, server, held):
    waiting = {"message": "preparing the start", "devices": [], "step": 0, "step_s": 0.11, "planned_steps": 0}
    folder = held(write_run(server.data, "on a cpu", state="queued", phase=None, **waiting))
    show(tab, server, folder)
    head = tab.locator("#run-head").inner_text()
    assert "Preparing" in head and "GPU" not in head and "Speed" not in head


def test_the_log_can_be_scrolled_by_keyboard(tab, server):
    folder = write_run(server.data, "keyboard", state="stopped")
    (folder / "training.log").write_text("".join(f"line {n}\n" for n in range(200)))
    show(tab, server, folder)
    log = tab.get_by_role("region", name="Training log")
    tab.locator("#delete").focus()
    for _ in range(30):
        tab.keyboard.press("Tab")
        if log.evaluate(f"(e) => e === {FOCUSED}"):
            break
    assert log.evaluate(f"(e) => e === {FOCUSED}")
    assert log.evaluate("(e) => getComputedStyle(e).outlineStyle") != "none"
    before = log.evaluate("(e) => e.scrollTop")
    tab.keyboard.press("PageUp")
    until(lambda: tab.wait_for_timeout(50) or log.evaluate("(e) => e.scrollTop") < before, "the log scrolls")


def test_the_log_leads_with_the_error_and_hides_the_launcher_after_a_stop(tab, server):
    launcher = (
        'Traceback (most recent call last):\n  File "/x/accelerate/commands/launch.py", line 9, in main\n    go()\n'
        "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 3.\n"
    )
    stopped = write_run(server.data, "log stopped", state="stopped")
    began = "=== 2026-11-22T20:15:38.271Z attempt 1: train.sh, from the start\n"
    (stopped / "training.log").write_text(began + "stopped on request at step 12\n" + launcher)
    (stopped / "events.jsonl").write_text('{"t": "2026-11-22T20:16:00.000Z", "kind": "stopping", "message": "x"}\n')
    show(tab, server, stopped)
    log = tab.locator("#run-log")
    log.get_by_text("4 lines of the launcher hidden").wait_for()
    assert "CalledProcessError" not in log.inner_text() and "stopped on request" in log.inner_text()
    failed = write_run(server.data, "log failed", state="failed", reason="exit code 2")
    error = "__main__.py: error: argument --optimizer_type: invalid choice: 'prodigy' (choose from adamw8bit, adamw)"
    (failed / "training.log").write_text(began + "usage: x\n" + error + "\n" + launcher)
    show(tab, server, failed)
    tab.get_by_test_id("first-error").get_by_text("invalid choice: 'prodigy'").wait_for()
    assert log.inner_text().index("prodigy") < log.inner_text().index("usage")


def test_a_page_whose_server_is_gone_says_so_and_recovers_by_itself(browser, tmp_path, held):
    data = tmp_path / "data"
    folder = held(write_run(data, "lives on", last_progress_at=datetime.now(UTC).isoformat()))
    write_run(data, "newer")
    with serving(data) as server, a_tab(browser) as page:
        show(page, server, folder)
        state_is(page, "running")
        assert page.get_by_test_id("state").inner_text() == "Training"
        began = time.monotonic()
        server.stop(hard=True)
        banner = page.get_by_role("alert").get_by_text("Not connected", exact=True)
        banner.wait_for(timeout=20_000)
        took_s = time.monotonic() - began
        assert page.get_by_test_id("state").inner_text() == "Not connected"
        assert "just now" not in page.locator("#run-head").inner_text()
        assert faint_texts(page) == []
        change_status(folder, step=77)
        with serving(data, port=server.port):
            banner.wait_for(state="detached", timeout=60_000)
            page.get_by_test_id("steps").get_by_text("77 of 100 steps").wait_for()
            assert page.get_by_test_id("run-name").inner_text() == "lives on"
            assert page.get_by_test_id("state").inner_text() == "Training"
            page.errors.clear()  # its requests to the dead server failed
    assert took_s < 8


def test_stop_answers_at_once_and_says_why_it_fails(tab, server, held):
    folder = held(write_run(server.data, "stops"))  # its train.sh is gone
    show(tab, server, folder)
    button = tab.locator("#stop")
    button.get_by_text("Stop", exact=True).wait_for()
    assert not tab.locator("#delete").is_visible() and not tab.locator("#rename").is_visible()  # it runs
    button.click()
    tab.locator("#run-notice").get_by_text("train.sh is missing").wait_for()
    button.get_by_text("Stop", exact=True).wait_for()
    (folder / "train.sh").write_text("")
    until(button.is_enabled, "it can be tried again")
    seen = tab.evaluate(
        """() => new Promise((done) => {
          const button = document.querySelector('#stop');
          const began = performance.now();
          const check = () => {
            if (button.textContent.trim() === 'Stopping…' && button.disabled) done(performance.now() - began);
            else if (performance.now() - began > 10000) done(1e9);
            else requestAnimationFrame(check);
          };
          button.click();
          check();
        })"""
    )
    assert seen < 300, f"{seen:.0f} ms"
    until(lambda: (folder / "stop.request").exists(), "the monitor is asked")
    tab.wait_for_timeout(2500)  # ticks, before the monitor has answered
    assert button.inner_text() == "Stopping…" and button.is_disabled()
    change_status(folder, state="stopped")
    button.wait_for(state="hidden")


def test_a_run_is_searched_renamed_and_deleted(tab, server, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    images = server.data / "datasets"
    for name in ("tulip red", "tulip blue"):
        spec = runs.make({"name": name, "model": "tiny-flux", "backend": "diffusers", "trigger": "tok"})
        folder = runs.create(spec, photos("coffee.png"))
        (folder / "status.json").write_text(json.dumps({"state": "stopped", "step": 3, "planned_steps": 9}))
    write_run(server.data, "rose", state="failed")
    show(tab, server, folder)
    names = tab.locator(".hp-run-name")
    field(tab, "run-search").fill("tulip")
    until(
        lambda: tab.wait_for_timeout(50) or names.all_inner_texts() == ["tulip blue", "tulip red"],
        "the list is searched",
    )
    field(tab, "run-search").fill("tulip RED")
    until(lambda: tab.wait_for_timeout(50) or names.all_inner_texts() == ["tulip red"], "the list is searched")
    tab.locator(".hp-run").click()
    tab.get_by_test_id("run-name").get_by_text("tulip red").wait_for()

    tab.locator("#rename").click()
    until(
        lambda: tab.wait_for_timeout(50) or tab.evaluate(f"!!{FOCUSED}.closest('#new-name')"), "the name has the focus"
    )
    field(tab, "new-name").fill("tulip blue")
    tab.keyboard.press("Enter")
    tab.locator("#run-notice").get_by_text("exists already").wait_for()
    field(tab, "new-name").fill("tulip green")
    tab.locator("#rename-ok").click()
    tab.get_by_test_id("run-name").get_by_text("tulip green").wait_for()
    field(tab, "run-search").fill("tulip")
    until(lambda: tab.wait_for_timeout(50) or "tulip green" in names.all_inner_texts(), "the list shows the new name")
    until(lambda: tab.wait_for_timeout(50) or "run=tulip-green" in tab.url, "the address names the renamed run")
    assert (images / "tulip-green").is_dir() and not (images / "tulip-red").exists()
    assert not tab.locator("#rename-panel").is_visible()

    (server.data / "outputs" / "tulip-green" / "big.bin").write_bytes(b"x" * 5_000_000)
    tab.locator("#delete").click()
    panel = tab.locator("#delete-panel")
    panel.get_by_text(re.compile(r"Delete the run 'tulip green'.*This frees 5\.\d MB")).wait_for()
    assert faint_texts(tab) == [] and nameless_controls(tab) == []
    tab.locator("#delete-no").click()
    panel.wait_for(state="hidden")
    assert (server.data / "outputs" / "tulip-green").is_dir()
    tab.locator("#delete").click()
    panel.get_by_label(re.compile("Also delete its data set: 1 image")).check()
    tab.locator("#delete-ok").click()
    tab.locator("#run-notice").get_by_text(re.compile(r"Deleted tulip-green\. This freed 5\.\d MB")).wait_for()
    until(lambda: tab.wait_for_timeout(50) or names.all_inner_texts() == ["tulip blue"], "it is gone from the list")
    assert not (server.data / "outputs" / "tulip-green").exists() and not (images / "tulip-green").exists()
    assert (images / "tulip-blue").is_dir()


def test_a_run_that_is_renamed_or_deleted_elsewhere_is_not_replaced_by_another(tab, server):
    """A click on Delete, asked for one run, deletes no other."""
    folder = write_run(server.data, "oak", state="stopped")
    other = write_run(server.data, "ash", state="stopped")
    show(tab, server, folder)
    folder.rename(folder.with_name("elm"))
    tab.get_by_text("The run 'oak' was renamed or deleted").wait_for()
    assert tab.get_by_test_id("run-name").count() == 0
    tab.locator("#run-list [data-run=elm]").click()
    tab.locator("[data-testid=run-name][data-run=elm]").wait_for()
    tab.locator("#delete").click()
    tab.locator("#delete-text").get_by_text("Delete the run").wait_for()
    shutil.rmtree(folder.with_name("elm"))
    tab.get_by_text("The run 'elm' was renamed or deleted").wait_for()
    tab.locator("#delete-ok").click()
    tab.locator("#run-notice").get_by_text("elm").wait_for()
    assert (other / "run.toml").is_file()


def test_an_answer_that_arrives_late_does_not_stay(tab, server):
    """What the timer asked about one run arrives when another run has been chosen."""
    rose = write_run(server.data, "late rose", state="failed", step=40)
    tulip = write_run(server.data, "late tulip", state="failed")
    show(tab, server, rose)
    name, held = tab.get_by_test_id("run-name"), []

    def hold(route):
        answer = route.fetch() if not held else None
        if answer is None:
            route.continue_()
        elif "run-name" in answer.text():
            held.append((route, answer))
        else:
            route.fulfill(response=answer)

    tab.route("**/run/predict*", hold)
    status = json.loads((rose / "status.json").read_text())
    (rose / "status.json").write_text(json.dumps({**status, "step": 41}))
    until(lambda: tab.wait_for_timeout(50) or held, "an answer is held")
    tab.locator(f".hp-run[data-run='{tulip.name}']").click()
    name.get_by_text("late tulip").wait_for()
    route, answer = held[0]
    route.fulfill(response=answer)
    name.get_by_text("late rose").wait_for()
    name.get_by_text("late tulip").wait_for()


@pytest.mark.parametrize("model", {presets.backend_of(model): model for model in presets.models()}.values())
def test_new_lora_from_this_run_works_for_every_trainer_and_its_message_is_in_view(tab, server, model, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    fields = {"name": f"of {model}", "model": model, "trigger": "tok", "epochs": 7}
    fields |= {"backend": presets.backend_of(model), "tier": presets.smallest_tier(model, presets.backend_of(model))}
    folder = runs.create(runs.make(fields), photos("coffee.png", "chelsea.png"), {"coffee.png": "tok, a cup"})
    show(tab, server, folder)
    tab.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    tab.get_by_role("button", name="New LoRA from this run").click()
    message = tab.get_by_text(f"Copied the settings, images and captions of '{fields['name']}'")
    message.wait_for()
    in_view = "(e) => { const b = e.getBoundingClientRect(); return b.top >= 0 && b.bottom <= innerHeight; }"
    until(lambda: tab.wait_for_timeout(50) or message.evaluate(in_view), "the message is in view")
    until(lambda: tab.wait_for_timeout(50) or len(captions(tab)) == 2, "the images are copied")
    assert sorted(captions(tab).values()) == ["tok", "tok, a cup"]
    assert field(tab, "epochs").input_value() == "7" and field(tab, "name").input_value() == f"of {model} 2"
