"""The lower part of a run: where its time went, a test of its start, the files for other places, and a command that refuses."""

import json
import time

from ledger_helpers import write_history
from ui_helpers import photos, serving, write_run
from ui_page import a_tab, assert_accessible, show_run, until

import runs
from ui import jobs
from ui.run import launch_tab


def open_run(page, server, name: str):
    """The opened part of a run."""
    show_run(page, server, name)
    fold = page.get_by_test_id("fold-elsewhere")
    if fold.get_attribute("open") is None:
        fold.locator("summary").click()
    fold.locator(".hp-place-choice").first.wait_for()
    return fold


def written(fold) -> None:
    """Press the button that writes the files, once it can be pressed."""
    until(fold.get_by_test_id("write-files").is_enabled, "the button can be pressed")
    fold.get_by_test_id("write-files").click()


def test_the_files_are_written_shown_and_downloaded_and_a_command_that_refuses_says_why(browser, data, tmp_path):
    values = {"name": "my cat", "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 4, "trigger": "cat"}
    runs.create(runs.make(values), photos("chelsea.png", "coffee.png"))
    old = write_run(data, "old", state="completed")
    write_history(old, 3.6)
    (old / jobs.FOLDER).mkdir()
    done = {"state": "done", "began_s": time.time(), "ended_s": time.time(), "pid": 1, "start": 0.0, "code": 0}
    (old / jobs.FOLDER / "probe.json").write_text(json.dumps(done))
    (old / jobs.FOLDER / "probe.out").write_text(json.dumps({"ok": True, "verdict": "They all train."}))
    failed = []

    def fail_once(route) -> None:
        if b"job_output" in (route.request.post_data_buffer or b"") and not failed:
            failed.append(route.request.url)
            route.abort()
        else:
            route.continue_()

    with serving(data, PATH=str(tmp_path / "no programs")) as server, a_tab(browser) as page:
        fold = open_run(page, server, "my-cat")
        assert fold.locator(".hp-place-choice").count() == len(launch_tab.PLACES)
        fold.get_by_label("Slurm cluster").check()
        fold.get_by_label("Partition").fill("night")
        assert fold.get_by_test_id("ask-submit").is_disabled() and "sbatch is not installed" in fold.inner_text()
        written(fold)
        script = fold.locator(".hp-file", has_text="train.sbatch")
        script.wait_for()
        assert "#SBATCH --partition=night" in script.locator("pre").inner_text()
        with page.expect_download() as download:
            script.get_by_role("link", name="Download").click()
        assert download.value.suggested_filename == "train.sbatch"
        assert "#SBATCH" in download.value.path().read_text()
        open_run(page, server, "old")
        fold = open_run(page, server, "my-cat")
        fold.locator(".hp-file", has_text="train.sbatch").wait_for()
        fold.get_by_label("One file").check()
        written(fold)
        link = fold.locator(".hp-file", has_text="my-cat.tar").get_by_role("link")
        link.wait_for()
        with page.expect_download() as download:
            link.click()
        assert download.value.path().stat().st_size > 100_000

        fold.get_by_label("RunPod").check()
        assert "no store" in fold.inner_text() and "RUNPOD_API_KEY" in fold.inner_text()
        written(fold)
        fold.get_by_text("Container image: Enter a value").wait_for()
        fold.get_by_label("Container image").fill("me/hangproof:1")
        written(fold)
        alert = fold.locator(".hp-job [role=alert]")
        alert.get_by_text("trains on a CPU").wait_for()
        assert fold.locator(".hp-job-state").inner_text() == "Failed"

        # Another run, whose probe has a verdict, although the first request for it fails; for everyone.
        page.route("**/component_server**", fail_once)
        fold = open_run(page, server, "old")
        page.get_by_test_id("fold-probe").locator("summary").click()
        page.get_by_test_id("fold-probe").get_by_text("They all train.").wait_for()
        assert failed
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 390, "height": 900})
        page.locator("#run-ledger").get_by_text("Time and money").wait_for()
        assert_accessible(page, "#run-elsewhere")
        fold.get_by_label("Slurm cluster").focus()
        page.keyboard.press("ArrowRight")
        assert fold.get_by_label("SkyPilot").is_checked()
        fold.get_by_label("No spot machines").wait_for()
