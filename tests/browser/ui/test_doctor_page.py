"""The tab Doctor, the rehearsal beside Start and the hang drill, in a real browser with real processes."""

import os
import re
import subprocess

from ui_helpers import serving
from ui_page import a_tab, assert_accessible, until

SCRIPT = """#!/bin/bash
accelerate launch --num_cpu_threads_per_process 1 flux_train_network.py --pretrained_model_name_or_path models/flux1-dev.sft \\
  --blocks_to_swap 18 --split_mode --max_data_loader_n_workers 2 --persistent_data_loader_workers
"""


def test_the_doctor_shows_the_machine_explains_a_process_and_checks_a_script(tab, bare_server):
    # A process that looks like a trainer whose monitor was killed.
    env = {**os.environ, "HANGPROOF_RUN": str(bare_server.data / "outputs" / "left-over"), "HANGPROOF_TOKEN": "0" * 32}
    process = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True)
    try:
        tab.goto(f"{bare_server.url}/?tab=doctor")
        machine = tab.locator("#doctor-machine")
        report = machine.get_by_role("region", name="Report")  # it looks by itself when it is opened
        report.get_by_text(re.compile(r"^(Fix first: |Ready\.)", re.MULTILINE)).wait_for()  # its last line
        for text in ("ok      Python", "GPU", "disk speed of runs", "built-in trainer PyTorch", "sd-scripts"):
            assert f"{text}: " in report.inner_text(), text
        assert f"left-over (sleep {process.pid}); run " in report.inner_text()

        why = tab.locator("#doctor-explain")
        why.get_by_label("Process number").fill(str(bare_server.process.pid))
        why.get_by_role("button", name="Explain").click()
        why.get_by_text(f"Process {bare_server.process.pid} (", exact=False).wait_for()
        region = why.get_by_role("region", name=f"Process {bare_server.process.pid}")
        region.get_by_text("Its parent is", exact=False).wait_for()

        lint = tab.locator("#doctor-lint")
        lint.locator("textarea").first.fill(SCRIPT)
        lint.get_by_role("button", name="Check the script").click()
        fixed = lint.locator("#doctor-fixed textarea")
        until(lambda: "flux_train_network.py" in fixed.input_value(), "the fixed script")
        assert "blocks_to_swap" not in fixed.input_value()
        until(lambda: lint.get_by_role("region").inner_text().count("train.sh:") >= 2, "what is wrong with the script")

        until(tab.get_by_role("button", name="Start the drill").is_enabled, "the drill can be started")
        assert_accessible(tab)  # with everything open
    finally:
        process.kill()
        process.wait(60)


def test_the_other_parts_are_shown_where_the_machine_cannot_be_examined(browser, tmp_path):
    with serving(tmp_path / "data") as server, a_tab(browser) as page:
        (server.data / ".doctor/.jobs/doctor.lock").mkdir(parents=True)  # as on a full disk, nothing can be started
        page.goto(f"{server.url}/?tab=doctor")
        page.get_by_text("doctor cannot be started: Is a directory").wait_for()
        page.get_by_role("button", name="Start the drill").wait_for()
