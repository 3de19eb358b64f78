"""Runs side by side, and a run's LoRAs as one archive."""

import zipfile

from ui_helpers import a_run, lora_file
from ui_page import assert_accessible, show_run, until


def test_runs_are_compared_and_downloaded_on_the_page(page, server):
    low = a_run(server.data, "low", 1e-4)
    a_run(server.data, "high", 1e-3, rank=16)
    for step in (20, 60):
        lora_file(low / f"low-step{step:06d}.safetensors", step, values=3000)
    show_run(page, server, "low")
    page.locator("#compare-fold button.label-wrap").first.click()
    page.locator("#compare-runs input").click()
    page.get_by_role("option", name="high").click()
    table = page.get_by_role("region", name="Settings that differ")
    rate = table.get_by_role("row", name="Learning rate")
    until(lambda: rate.inner_text().split()[2:] == ["0.0001", "0.001"], "both learning rates")
    pictures = page.locator("#compare-samples img")
    expected = ["low, step 60: a cat", "high, step 60: a cat"]
    until(lambda: pictures.evaluate_all("(all) => all.map((one) => one.alt)") == expected, "the samples")
    page.locator("#compare-loss svg.marks").wait_for()
    a_run(server.data, "other", 1e-3, rank=32)  # begun since
    page.locator("#compare-runs input").blur()
    page.locator("#compare-runs input").fill("oth")
    page.get_by_role("option", name="other").click()
    until(lambda: pictures.count() == 3, "the samples of three runs")
    assert_accessible(page, "#compare-fold")
    with page.expect_download() as download:
        page.get_by_test_id("download-all").click()
    assert download.value.suggested_filename == "low.zip"
    assert zipfile.is_zipfile(download.value.path())
    for name in ("gone.zip", "..%2Flow.zip", "low", "low%2F..%2Flow.zip", "%00.zip", "high.zip"):
        assert server.get(f"/downloads/{name}")[0] == 404, name
    assert server.get("/downloads/low.zip", Host="evil.example")[0] == 403
