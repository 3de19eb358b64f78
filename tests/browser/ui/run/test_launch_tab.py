"""The lower part of a run: where its time went, the files for other places, and a command that refuses."""

from runs_helpers import sources
from ui_helpers import photos, serving, write_history, write_run
from ui_page import a_tab, assert_accessible, show_run, until

import runs
from ui.run import launch_tab


def open_run(page, server, name: str):
    """The opened part of a run."""
    show_run(page, server, name)
    page.locator("#checks-fold > button.label-wrap:not(.open)").click()  # that of the run before closes first
    page.locator("#check-elsewhere > button.label-wrap:not(.open)").click()
    part = page.locator("#check-elsewhere")
    part.get_by_label("Slurm cluster").wait_for()
    return part


def test_the_files_are_written_shown_and_downloaded_and_a_command_that_refuses_says_why(browser, data, tmp_path):
    values = {"name": "my cat", "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 4, "trigger": "cat"}
    runs.create(runs.make(values), sources(photos("chelsea.png", "coffee.png")))
    write_history(write_run(data, "old", state="completed"), 3.6)
    with serving(data, PATH=str(tmp_path / "no programs")) as server, a_tab(browser) as page:
        part = open_run(page, server, "my-cat")
        until(lambda: part.get_by_role("radio").count() == len(launch_tab.PLACES), "every place")
        part.get_by_label("Partition").fill("night")
        part.get_by_text("sbatch is not installed").first.wait_for()
        until(page.locator("#submit-slurm").is_disabled, "it cannot be submitted")
        page.locator("#write-slurm").click()
        script = part.locator(".hp-file", has_text="train.sbatch")
        script.wait_for()
        assert "#SBATCH --partition=night" in script.locator("pre").inner_text()
        with page.expect_download() as download:
            script.get_by_role("link", name="Download").click()
        assert download.value.suggested_filename == "train.sbatch"
        assert "#SBATCH" in download.value.path().read_text()
        open_run(page, server, "old")
        part = open_run(page, server, "my-cat")
        part.locator(".hp-file", has_text="train.sbatch").wait_for()
        part.get_by_label("RunPod").check()
        pod = page.locator("#place-runpod")
        pod.get_by_text("RUNPOD_API_KEY").wait_for()
        part.get_by_text("no store").first.wait_for()
        pod.get_by_label("Container image").fill("me/hangproof:1")
        page.locator("#write-runpod").click()
        pod.locator(".hp-job [role=alert]").get_by_text("trains on a CPU").wait_for()
        pod.locator(".hp-job-state").get_by_text("Failed", exact=True).wait_for()

        # Another run, for everyone.
        open_run(page, server, "old")
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 390, "height": 900})
        page.locator("#run-ledger").get_by_text("Time and money").wait_for()
        assert_accessible(page, "#checks-fold")
