"""A real run in two browsers: its trainer and the page's server are killed in the middle, and charts, log, comparison and download
show one run from its first step to its last."""

import contextlib
import json
import os
import signal
import zipfile

import pytest
from ui_helpers import PACED, browsing, kill_runs, photos, serving, wait_for_step
from ui_page import RUN_S, a_tab, state_is, until

import runs
from ui.run import view

STEPS = 16


def create(name: str, rate: float):
    spec = {
        "name": name,
        "model": "tiny-flux",
        "backend": "diffusers",
        "trigger": "tok",
        "epochs": STEPS // 2,
        "repeats": 2,
    }
    more = {
        "save_every_n_steps": 4,
        "sample_every_n_steps": 8,
        "sample_steps": 1,
        "prompts": ["a cup"],
        "learning_rate": rate,
    }
    return runs.create(runs.make({**spec, **more}), photos("coffee.png"))


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_charts_log_comparison_and_download_of_a_run_that_was_restarted(tmp_path, monkeypatch):
    data = tmp_path / "data"
    monkeypatch.setenv("HANGPROOF_DATA", str(data))
    one, two = create("one", 1e-4), create("two", 1e-3)
    try:
        with browsing() as browser, contextlib.ExitStack() as tabs:
            first, second = (tabs.enter_context(a_tab(browser)) for _ in range(2))
            with serving(data, **PACED) as server:
                first.goto(f"{server.url}/?run=one")
                second.goto(f"{server.url}/?run=one")
                first.locator("#go").click()
                wait_for_step(one, 6)
                for page in (first, second):
                    page.locator(".hp-main-chart").wait_for()
                server.stop(hard=True)
                [trainer] = json.loads((one / "status.json").read_text())["trainer_pids"]
                os.kill(trainer, signal.SIGKILL)
            with serving(data, port=server.port, **{**PACED, "HANGPROOF_PACE_S": "0.1"}):
                state_is(first, "completed")
                for page in (first, second):
                    page.locator(f".hp-main-chart[aria-label^='Loss, step 1 to step {STEPS}']").wait_for(
                        timeout=RUN_S * 1000
                    )
                    assert page.locator(".hp-main-chart .hp-mark").count() == 1
                    page.errors.clear()  # requests to the server that was killed
                steps = view.with_metrics(one, lambda found: found.steps["step"].tolist())
                assert steps == list(range(1, STEPS + 1))  # one line, although some steps were trained twice
                written = [
                    json.loads(line)["step"]
                    for line in (one / "metrics.jsonl").read_text().splitlines()
                    if '"step"' in line
                ]
                assert len(written) > STEPS
                second.get_by_role("link", name="Incident 0001").focus()
                second.keyboard.press("Enter")
                until(lambda: second.evaluate("document.activeElement.id") == "incident-0001", "the incident is opened")
                first.get_by_label("Jump to an incident").select_option("0001")
                first.locator(".hp-log-here").wait_for()
                first.get_by_role("searchbox", name="Search the log").fill("attempt 2")
                first.get_by_role("region", name="Training log").get_by_text("attempt 2").first.wait_for()
                with second.expect_download() as download:
                    second.get_by_test_id("download-all").click()
                with zipfile.ZipFile(download.value.path()) as archive:
                    assert archive.testzip() is None
                    assert archive.read("one/one.safetensors") == (one / "one.safetensors").read_bytes()
                first.locator("#run-list [data-run=two]").click()
                first.locator("[data-testid=run-name][data-run=two]").wait_for()
                first.locator("#go").click()
                wait_for_step(two, STEPS)
                state_is(first, "completed")
                first.get_by_test_id("fold-compare").locator("summary").click()
                first.get_by_role("checkbox", name="one").check()
                first.get_by_role("img", name="Loss of the runs").wait_for()
                table = first.get_by_role("region", name="Settings that differ")
                assert table.get_by_role("row", name="Learning rate").inner_text().split()[2:] == ["0.001", "0.0001"]
                first.get_by_role("img", name=f"Sample of one, step {STEPS}").wait_for()
    finally:
        kill_runs(data)
