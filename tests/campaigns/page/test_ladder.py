"""The ladder in two browsers: the page's server is killed in its second rung; the other browser cancels a second one."""

import json
import re

import pytest
from runs_helpers import picture
from short_run_helpers import TINY, nothing_runs
from two_browsers import open_check, open_run, stays_open, two_browsers
from ui_helpers import PACED, serving
from ui_page import RUN_S, until

import runs
from launch.short_run import SCRATCH

IMAGES = 5
PACE = {**PACED, "HANGPROOF_PACE_S": "1.5", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def job_shows(page, text: str | re.Pattern[str]) -> None:
    """Wait until the ladder's part of the page shows a text."""
    page.locator("#check-ladder").get_by_text(text).first.wait_for(timeout=RUN_S * 1000)


@pytest.mark.timeout(1800)
def test_the_ladder_leaves_its_finding_in_two_browsers_although_the_server_is_killed_in_its_second_rung(
    browser, data, tmp_path
):
    for number in range(IMAGES):
        picture(tmp_path / "pictures" / f"photo{number}.png", (96, 64 if number % 2 else 96))
    folder = runs.create(runs.make({"name": "tiny", **TINY}), tmp_path / "pictures")
    broken = sorted((data / "datasets" / "tiny").glob("*.png"))[3]
    whole = broken.read_bytes()
    broken.write_bytes(whole[:80])
    output = folder / ".jobs" / "ladder.out"
    with two_browsers(browser) as (first, second):
        with serving(data, **PACE) as server:
            open_run(server, "tiny", first, second)
            for page in (first, second):
                open_check(page, "ladder")
                stays_open(page)
            first.locator("#start-ladder").click()
            for page in (first, second):
                job_shows(page, re.compile(r"Running for"))
                job_shows(page, re.compile(r"2 images: trains"))
            until(lambda: f"all {IMAGES} images …" in output.read_text(), "the second rung", RUN_S)
            server.stop(hard=True)
            assert json.loads(output.with_suffix(".json").read_text())["state"] == "running"
        with serving(data, port=server.port, **PACE) as server:
            for page in (first, second):
                page.wait_for_function("window.notReloaded === undefined")
                page.locator("body.hp-open").wait_for()
                open_check(page, "ladder")
                job_shows(page, f"One image stops the training: {broken.name}.")
                job_shows(page, "Remove this image or export it again")
                page.locator("#check-ladder [data-state=failed]").wait_for()

            broken.write_bytes(whole)
            second.locator("#start-ladder").click()
            for page in (first, second):
                job_shows(page, re.compile(r"2 images …"))
            first.locator("#cancel-ladder").click()  # the other one's
            for page in (first, second):
                page.locator("#check-ladder [data-state=cancelled]").wait_for(timeout=RUN_S * 1000)
            assert nothing_runs_but(server, data) and not (data / SCRATCH).exists()
    assert nothing_runs(data)


def nothing_runs_but(server, data) -> bool:
    """Whether nothing of the data folder runs beside the page's server."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HANGPROOF_DATA", "").startswith(str(data)) and process.pid != server.process.pid:
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return [words for words in found if "launch" in words] == []
