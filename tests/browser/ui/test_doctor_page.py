"""The tab Doctor, the rehearsal beside Start, the ladder and the hang drill, in a real browser with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ui_helpers import kill_runs, serving
from ui_page import choose_tiny, drop, field, open_page, state_is, until

import doctor_tools
from monitor.cli import explain
from monitor.process import platform
from monitor.run_folder import MonitorError
from runs.files import RunError
from tests.browser.ui.new.test_try_it import alone, pictures
from tests.browser.ui.test_axe import faults
from ui import doctor_page

SCRIPT = """#!/bin/bash
accelerate launch --num_cpu_threads_per_process 1 flux_train_network.py --pretrained_model_name_or_path models/flux1-dev.sft \\
  --blocks_to_swap 18 --split_mode --max_data_loader_n_workers 2 --persistent_data_loader_workers
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server on a machine without a GPU, and without kohya's trainers."""
    folder = tmp_path_factory.mktemp("doctor")
    nowhere = {"SD_SCRIPTS_DIR": str(folder / "no"), "MUSUBI_DIR": str(folder / "no")}
    with serving(folder / "data", **alone(folder), **nowhere) as running:
        yield running
        kill_runs(running.data)


def a_left_over(data: Path) -> subprocess.Popen:
    """A process that looks like a trainer whose monitor was killed."""
    code = "import time, sys; print('ready', flush=True); time.sleep(600)"
    run = data / "outputs" / "left-over"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "HANGPROOF_RUN": str(run), "HANGPROOF_TOKEN": "0" * 32},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def test_the_doctor_shows_the_machine_explains_a_process_and_checks_a_script(tab, server):
    process = a_left_over(server.data)
    try:
        open_page(tab, server)
        tab.get_by_role("tab", name="Doctor").click()
        machine = tab.get_by_test_id("doctor-machine")
        machine.get_by_test_id("copy-report").wait_for()  # it looks by itself when it is opened
        rows = {row.locator("strong").inner_text(): row for row in machine.locator(".hp-finding").all()}
        assert {
            "Python",
            "GPU",
            "Memory",
            "Disk speed of runs",
            "Built-in trainer PyTorch",
            "sd-scripts",
        } <= rows.keys()
        assert rows["Python"].get_attribute("data-status") == "ok" and "./start.sh" in rows["sd-scripts"].inner_text()
        assert f"(pid {process.pid}) of the run left-over" in machine.inner_text()

        left = tab.get_by_test_id("doctor-orphans")
        left.get_by_role("button", name=f"End process {process.pid}").click()
        left.get_by_role("button", name="now?").click()
        left.get_by_text(f"Process {process.pid}", exact=False).first.wait_for()
        until(lambda: process.poll() is not None, "the process is ended")
        left.get_by_text("of left-over) was ended", exact=False).wait_for()

        why = tab.get_by_test_id("doctor-explain")
        why.get_by_label("Process number").fill("0; rm -rf /")
        why.get_by_role("button", name="Explain").click()
        why.get_by_text("is no process number", exact=False).wait_for()
        why.get_by_label("Process number").fill(str(server.process.pid))
        why.get_by_role("button", name="Explain").click()
        why.get_by_text(f"Process {server.process.pid} (", exact=False).wait_for()
        stacks = why.get_by_role("region", name=f"Stacks of process {server.process.pid}")
        stacks.or_(why.get_by_text("Its stacks could not be read in time", exact=False)).wait_for()  # a busy machine

        lint = tab.get_by_test_id("doctor-lint")
        lint.get_by_label("Script").fill("echo '<img src=x onerror=alert(1)>'")
        lint.get_by_role("button", name="Check the script").click()
        lint.get_by_text("There is no training command in this script", exact=False).wait_for()
        lint.get_by_label("Script").fill(SCRIPT)
        lint.get_by_role("button", name="Check the script").click()
        lint.get_by_test_id("copy-fixed").wait_for()
        assert lint.locator(".hp-finding").count() >= 2
        assert "blocks_to_swap" not in lint.get_by_role("region", name="Fixed script").inner_text()

        assert faults(tab) == []  # axe-core, with everything open
        tab.emulate_media(color_scheme="dark")
        tab.reload()  # what was found is still there
        tab.locator("body.hp-open").wait_for()
        tab.get_by_role("tab", name="Doctor").click()
        machine.get_by_test_id("copy-report").wait_for()
        assert tab.get_by_test_id("doctor-drill").get_by_role("button", name="Start the drill").is_enabled()
        assert faults(tab) == [], "in the dark"
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.long
def test_a_failed_rehearsal_is_asked_about_and_survives_the_server(browser, tmp_path):
    from ui_page import a_tab

    data = tmp_path / "data"
    (data / "models").mkdir(parents=True)
    # Of the attempt that rehearses, the first step hangs.
    fault = {"INJECT": "benchmarks.injector:fire", "FAULT": "raises", "FAULT_PHASE": "first_step", "FAULT_STEP": "0"}
    broken = {f"HANGPROOF_{name}": value for name, value in fault.items()}
    try:
        with a_tab(browser) as tab:
            with serving(data, **alone(tmp_path), **broken) as server:
                open_page(tab, server)
                drop(tab, *pictures(tmp_path / "photos", 3), count=3)
                choose_tiny(tab)
                field(tab, "name").fill("rehearsed")
                field(tab, "trigger").fill("ohwx")
                tab.get_by_test_id("rehearse").click()
                shown = tab.get_by_test_id("rehearsal-state")
                shown.get_by_text("Rehearsing for", exact=False).wait_for()
                server.stop(hard=True)
            with serving(data, port=server.port, **alone(tmp_path), **broken) as server:
                open_page(tab, server)
                shown.get_by_text("The rehearsal failed at “Train two steps”", exact=False).wait_for()
                tab.get_by_text("injected: the step failed", exact=False).first.wait_for()
                tab.locator("#start").click()
                tab.locator("#problem").get_by_text("Press Start again to start anyway", exact=False).wait_for()
                assert not (data / "outputs" / "rehearsed").exists()
                field(tab, "trigger").fill("other")
                shown.get_by_text("Out of date: the settings have changed since", exact=False).wait_for()
                field(tab, "trigger").fill("ohwx")
                until(lambda: "Out of date" not in shown.inner_text(), "the settings are those that were rehearsed")
                tab.locator("#start").click()
                tab.locator("[data-testid=state]").first.wait_for()
                assert (data / "outputs" / "rehearsed" / "rehearsal.json").is_file()
    finally:
        kill_runs(data)


@pytest.mark.long
def test_a_rehearsal_that_passes_shows_its_figures_and_the_ladder_names_the_broken_image(tab, server, tmp_path):
    open_page(tab, server)
    drop(tab, *pictures(tmp_path / "photos", 4), count=4)
    choose_tiny(tab)
    field(tab, "name").fill("ladder")
    field(tab, "trigger").fill("ohwx")
    tab.get_by_test_id("rehearse").click()
    tab.get_by_test_id("rehearsal-state").get_by_text("The rehearsal passed", exact=False).wait_for(timeout=300_000)
    assert tab.locator(".hp-stage[data-state=done]").count() == 7
    tab.get_by_text("started now, the run ends on", exact=False).wait_for()
    tab.locator("#start").click()
    state_is(tab, "completed", "failed")
    folder = server.data / "datasets" / "ladder"
    broken = sorted(folder.glob("*.png"))[2]
    broken.write_bytes(broken.read_bytes()[:60])
    tab.get_by_test_id("fold-ladder").locator("summary").click()
    tab.get_by_test_id("ladder").click()
    verdict = tab.get_by_test_id("fold-ladder").locator(".hp-verdict")
    verdict.get_by_text(f"One image stops the training: {broken.name}", exact=False).wait_for(timeout=300_000)


@pytest.mark.long
def test_the_drill_is_started_from_the_tab_and_shown_to_its_end(tab, server):
    open_page(tab, server)
    tab.get_by_role("tab", name="Doctor").click()
    tab.get_by_test_id("drill-start").click()
    tab.get_by_test_id("drill").wait_for()
    for stage in ("freeze", "detect", "explain", "kill", "restart", "recover", "end"):
        tab.locator(f".hp-drill [data-stage={stage}][data-state=done]").wait_for(timeout=300_000)
    tab.get_by_text("First new step after").wait_for()
    tab.get_by_test_id("incident").first.wait_for()


# Arguments that nobody should send --------------------------------------------------------------------------------------


@settings(max_examples=1500)
@given(
    st.one_of(
        st.text(max_size=30),
        st.integers(),
        st.floats(),
        st.booleans(),
        st.none(),
        st.binary(max_size=9),
        st.lists(st.integers()),
    )
)
def test_no_process_number_does_harm(pid):
    mine = {process.pid for process in platform.scan().values()} if isinstance(pid, int) and 0 < pid < 5000 else set()
    try:
        found = explain.checked(pid)
    except MonitorError as error:
        assert str(error) and len(str(error)) < 300
    else:
        assert found.pid in mine or os.path.exists(f"/proc/{found.pid}")


@settings(max_examples=200)
@given(
    st.one_of(st.integers(), st.text(max_size=9), st.none()),
    st.one_of(st.integers(), st.floats(), st.text(max_size=9), st.none()),
)
def test_only_an_orphan_can_be_ended(pid, start):
    with pytest.raises(RunError):
        doctor_tools.end_orphan(pid, start)


WORDS = st.sampled_from(
    ["accelerate launch ", "flux_train_network.py", " --split_mode", " --blocks_to_swap", "=", "18", "\\\n", "\r\n", "'", '"', "`", "$(",
     ")", "&&", "| tee log", " --config_file ", "/etc/passwd", "--output_dir ", "\ufeff", "\0", "#", "{", "}", "<<EOF\n", "é"]
)  # fmt: skip


@settings(max_examples=500)
@given(
    st.lists(st.one_of(WORDS, st.text(max_size=20)), max_size=25).map("".join),
    st.sampled_from(["train.sh", "train.bat", "train.ps1"]),
)
def test_a_pasted_script_is_judged_or_refused_and_nothing_is_written(text, name):
    base = Path("/nonexistent")
    answer = doctor_tools.judge_script(text, name, base)
    assert answer.keys() in ({"error"}, {"findings", "fixed", "changes", "note"})
    json.dumps(answer)


@pytest.mark.parametrize("given_", [None, [], {}, {"do": 1}, {"do": "rm"}, {"do": "explain", "pid": {"a": 1}}, {"do": "lint", "text": 5},
                                    {"do": "lint", "text": "x" * 300_000}, {"do": "drill", "kind": "../x"}, {"do": "end"}])  # fmt: skip
def test_the_tab_refuses_what_no_page_sends(given_, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    answer = doctor_page.doctor(given_)
    assert answer["ok"] is False and answer["error"]


def test_a_report_has_no_home_no_token_and_no_password():
    home = str(Path.home())
    text = doctor_tools.without_secrets(
        f"{home}/models https://me:secret@host/x hf_abcdefghijklmnop sk-1234567890abcdef"
    )
    assert home not in text and "secret" not in text and "hf_" not in text and "sk-" not in text


def test_a_dead_lock_a_read_and_a_stop_are_explained(tmp_path):
    code = "import sys, threading; lock = threading.Lock(); lock.acquire(); print('r', flush=True)\n"
    pipe = "import os; r, w = os.pipe(); print('r', flush=True); os.read(r, 1)"
    for program, words in ((code + "lock.acquire()", "for a lock"), (pipe, "pipe")):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(0.2)
            until(lambda p=process, w=words: w in explain.facts(explain.checked(p.pid))["text"], f"{words} is said", 10)
            process.send_signal(signal.SIGSTOP)
            until(
                lambda p=process: "is stopped by a signal" in explain.facts(explain.checked(p.pid))["text"],
                "stopped",
                10,
            )
        finally:
            process.kill()
            process.wait(60)


@pytest.mark.parametrize(("mounts", "kind"), [("server:/x /data nfs4 rw 0 0", "nfs4"), ("d /data fuse.sshfs rw 0 0", "fuse.sshfs"),
                                              ("d / ext4 rw 0 0\nd /data ext4 rw 0 0", ""), ("x /data\\040disk cifs rw 0 0\nd / xfs rw 0 0", "")])  # fmt: skip
def test_a_network_disk_is_a_warning(mounts, kind):
    import doctor_machine

    (found,) = doctor_machine.file_system("runs", Path("/data/outputs"), mounts) or [None]
    assert (found.status == "note" and f"({kind}," in found.text) if kind else found.status == "ok"
