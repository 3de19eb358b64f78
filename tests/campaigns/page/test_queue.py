"""The queue, requests and a pause in a real browser, with real trainings of the tiny model; two browsers, and a killed server."""

import json
import re
from pathlib import Path

import pytest
from monitor_helpers import events, wait_for
from runs_helpers import pictures
from ui_helpers import serving
from ui_page import a_tab, open_page

import runs

FIELDS = {"model": "tiny-flux", "backend": "diffusers", "tier": "16G", "resolution": 64, "workers": 0}
LONG, SHORT = 3000, 5


@pytest.fixture
def data(data, tmp_path):
    """A data root with three runs: a long one and two short ones."""
    images = pictures(tmp_path / "photos", 2)
    for name, steps in (("cat", LONG), ("dog", SHORT), ("owl", SHORT)):
        fields = {"max_train_steps": steps, "save_every_n_steps": 1000, "sample_every_n_steps": 2000, "sample_steps": 2}
        runs.create(runs.make({"name": name, **FIELDS, "trigger": "ohwx", **fields}), images)
    return data


def state(data: Path, name: str) -> str:
    return json.loads((data / "outputs" / name / "status.json").read_text())["state"]


def order(page) -> list[str]:
    return [one.get_attribute("data-run") for one in page.locator(".hp-queue ol > li").all()]


def choose(page, name: str) -> None:
    page.locator(f"#run-list [data-run='{name}']").click()
    page.locator(f"[data-testid='run-name'][data-run='{name}']").wait_for()


def show_runs(page, server) -> None:
    open_page(page, server)
    page.get_by_role("tab", name="Runs").click()
    page.locator("#run-list [data-run='cat']").wait_for()


@pytest.mark.timeout(900)
def test_a_queue_in_two_browsers(browser, data):
    environment = {"HANGPROOF_GPUS": "test"}
    with a_tab(browser) as page, a_tab(browser) as other:
        with serving(data, **environment) as server:
            show_runs(page, server)
            show_runs(other, server)
            choose(page, "cat")
            page.locator("#go").click()
            note = page.get_by_test_id("action-note")
            page.get_by_test_id("do-sample").wait_for()
            page.get_by_test_id("do-sample").click()
            note.get_by_text(re.compile(r"^1 of 1 sample images of step \d+, as requested\.$")).wait_for()
            page.get_by_test_id("do-save").click()
            note.get_by_text(re.compile(r"^A checkpoint and its LoRA of step \d+, as requested\.$")).wait_for()
            assert list((data / "outputs" / "cat").glob("cat-step*.safetensors"))

            for name in ("dog", "owl"):  # the GPU is busy: Start puts them into the queue
                choose(other, name)
                other.locator("#go").click()
                other.get_by_test_id("action-note").get_by_text("Waits in the queue, position").wait_for()
            page.locator(".hp-queue li[data-run='owl']").wait_for()
            assert order(page) == ["dog", "owl"]
            up = page.get_by_role("button", name="Move up: owl")
            up.focus()
            page.keyboard.press("Enter")  # with the keyboard, and the other browser sees it
            other.locator(".hp-queue ol > li:first-child[data-run='owl']").wait_for()
            assert order(other) == ["owl", "dog"]
            assert server.stop(hard=True)  # SIGKILL

        with serving(data, port=server.port, **environment) as server:
            show_runs(page, server)
            page.locator(".hp-queue ol > li:first-child[data-run='owl']").wait_for()
            assert order(page) == ["owl", "dog"] and state(data, "cat") == "running"
            page.get_by_role("button", name="Remove from the queue: dog").click()
            page.locator(".hp-queue li[data-run='dog']").wait_for(state="detached")
            page.get_by_role("button", name="Run now, and pause what runs: owl").click()
            wait_for(lambda: state(data, "owl") == "completed", timeout_s=300, what="the run that was to be first")
            wait_for(lambda: state(data, "cat") == "running", timeout_s=300, what="the run that made room")
            assert [event["kind"] for event in events(data / "outputs" / "cat")].count("paused") == 1
            assert not (data / "outputs" / "dog" / "status.json").exists()

            choose(page, "cat")
            page.get_by_test_id("do-pause").click()
            page.locator("[data-testid='state'][data-state='paused']").wait_for()
            page.locator("#go", has_text="Resume").click()
            page.locator("[data-testid='state'][data-state='running']").wait_for()
            page.locator("#stop").click()
            page.locator("[data-testid='state'][data-state='stopped']").wait_for()
