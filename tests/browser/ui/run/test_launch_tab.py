"""The lower part of a run: where its time went, the files for other places, the probe, and what the ranks do."""

import os

import pytest
from ledger_helpers import write_history
from ui_helpers import photos, serving, write_run
from ui_page import a_tab, assert_accessible, open_page, until

import runs
from ui.run import launch_tab


def make_run(name: str):
    """A run as `runs.create` writes it, on the tiny model."""
    values = {"name": name, "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 4, "trigger": "cat"}
    return runs.create(runs.make(values), photos("chelsea.png", "coffee.png"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    data = tmp_path_factory.mktemp("launch") / "data"
    data.mkdir()
    before = os.environ.get("HANGPROOF_DATA")
    os.environ["HANGPROOF_DATA"] = str(data)
    try:
        make_run("my cat")
        write_history(write_run(data, "old", state="completed"), 3.6)
        with serving(data, PATH=str(tmp_path_factory.mktemp("no-programs"))) as running:
            yield running
    finally:
        os.environ.pop("HANGPROOF_DATA") if before is None else os.environ.__setitem__("HANGPROOF_DATA", before)


def open_run(page, server, name: str):
    open_page(page, server)
    page.get_by_role("tab", name="Runs").click()
    page.locator(f".hp-run[data-run={name}]").click()
    page.locator(f"[data-testid=run-name][data-run={name}]").wait_for()
    fold = page.get_by_test_id("fold-elsewhere")
    fold.locator("summary").click()
    fold.locator(".hp-place-choice").first.wait_for()
    return fold


def test_the_files_are_written_shown_and_downloaded(browser, server):
    with a_tab(browser) as page:
        fold = open_run(page, server, "my-cat")
        assert fold.locator(".hp-place-choice").count() == len(launch_tab.PLACES)
        fold.get_by_label("Slurm cluster").check()
        fold.get_by_label("Partition").fill("night")
        assert fold.get_by_test_id("ask-submit").is_disabled() and "sbatch is not installed" in fold.inner_text()
        fold.get_by_test_id("write-files").click()
        script = fold.locator(".hp-file", has_text="train.sbatch")
        script.wait_for()
        assert "#SBATCH --partition=night" in script.locator("pre").inner_text()
        with page.expect_download() as download:
            script.get_by_role("link", name="Download").click()
        assert download.value.suggested_filename == "train.sbatch"
        assert "#SBATCH" in download.value.path().read_text()
        page.reload()
        fold = open_run(page, server, "my-cat")
        fold.locator(".hp-file", has_text="train.sbatch").wait_for()
        fold.get_by_label("One file").check()
        until(fold.get_by_test_id("write-files").is_enabled, "the button can be pressed again")
        fold.get_by_test_id("write-files").click()
        link = fold.locator(".hp-file", has_text="my-cat.tar").get_by_role("link")
        link.wait_for()
        with page.expect_download() as download:
            link.click()
        assert download.value.path().stat().st_size > 100_000


def test_a_command_that_refuses_says_why(browser, server):
    with a_tab(browser) as page:
        fold = open_run(page, server, "my-cat")
        fold.get_by_label("RunPod").check()
        assert "no store" in fold.inner_text() and "RUNPOD_API_KEY" in fold.inner_text()
        fold.get_by_test_id("write-files").click()
        fold.get_by_text("Container image: Enter a value").wait_for()
        fold.get_by_label("Container image").fill("me/hangproof:1")
        until(fold.get_by_test_id("write-files").is_enabled, "the button can be pressed again")
        fold.get_by_test_id("write-files").click()
        alert = fold.locator(".hp-job [role=alert]")
        alert.wait_for()
        assert "trains on a CPU" in alert.inner_text()
        assert fold.locator(".hp-job-state").inner_text() == "Failed"


def test_it_can_be_read_and_used_by_everyone(browser, server):
    with a_tab(browser, width=390, color_scheme="dark") as page:
        fold = open_run(page, server, "old")
        assert page.locator("#run-ledger").get_by_text("Time and money").is_visible()
        assert_accessible(page, "#run-elsewhere")
        fold.get_by_label("Slurm cluster").focus()
        page.keyboard.press("ArrowRight")
        assert fold.get_by_label("SkyPilot").is_checked()
        fold.get_by_label("No spot machines").wait_for()
