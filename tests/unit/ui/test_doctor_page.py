"""The tab Doctor: what it asks and answers, whatever is sent to it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ui_helpers import write_run

import doctor_machine
import doctor_tools
from runs.files import RunError
from ui import doctor_page, jobs


@settings(max_examples=30)
@given(st.integers() | st.text(max_size=9) | st.none(), st.integers() | st.floats() | st.text(max_size=9) | st.none())
def test_only_an_orphan_can_be_ended(pid, start):
    with pytest.raises(RunError):
        doctor_tools.end_orphan(pid, start)


WORDS = ["accelerate launch ", "flux_train_network.py", " --split_mode", " --blocks_to_swap", "=", "18", "| tee log"]
WORDS += [
    " --config_file ",
    "/etc/passwd",
    "--output_dir ",
    "<<EOF\n",
    "\\\n",
    "\r\n",
    "$(",
    "&&",
    *"'\"`)\ufeff\0#{}é",
]


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from(WORDS) | st.text(max_size=20), max_size=25).map("".join),
    st.sampled_from(["train.sh", "train.bat", "train.ps1"]),
)
def test_a_pasted_script_is_judged_or_refused_and_nothing_is_written(text, name):
    answer = doctor_tools.judge_script(text, name, Path("/nonexistent"))
    assert answer.keys() in ({"error"}, {"findings", "fixed", "changes", "note"})
    json.dumps(answer)


def test_what_is_no_script_and_what_is_no_process_is_refused():
    for act, value in (
        *((doctor_tools.lint_script, text) for text in (5, None, "", "x" * 300_000)),
        *((doctor_page.explain, pid) for pid in ({"a": 1}, None, "0; rm -rf /", "999999999999")),
    ):
        with pytest.raises(RunError):
            act(value)


def test_a_report_has_no_home_no_token_and_no_password():
    home = str(Path.home())
    given_text = f"{home}/models https://me:secret@host/x hf_abcdefghijklmnop sk-1234567890abcdef"
    text = doctor_tools.without_secrets(given_text)
    assert home not in text and "secret" not in text and "hf_" not in text and "sk-" not in text


def test_a_network_disk_is_a_warning(monkeypatch):
    for mounts, kind in (
        ({"/": "ext4", "/data": "nfs4"}, "nfs4"),
        ({"/data": "fuse.sshfs", "/": "ext4"}, "fuse.sshfs"),
        ({"/data/outputs2": "nfs", "/data": "ext4"}, ""),
        ({"/data disk": "cifs", "/": "xfs"}, ""),
    ):
        table = [SimpleNamespace(mountpoint=at, fstype=name) for at, name in mounts.items()]
        monkeypatch.setattr("psutil.disk_partitions", lambda all, table=table: table)
        (found,) = doctor_machine.file_system("runs", Path("/data/outputs"))
        assert (found.status == "note" and f"({kind}," in found.text) if kind else found.status == "ok"


def test_the_last_drill_is_shown_with_a_link_to_its_run(data, monkeypatch):
    assert doctor_page.look_at_drill() == (False, "")
    job, run = {}, {"run": "demo"}
    monkeypatch.setattr(jobs, "read", lambda folder, name: jobs.Job(name, job["state"], 1.0))
    monkeypatch.setattr(jobs, "output", lambda *_: ([], job["answer"], "launch drill: no space is left"))
    for state, answer, busy, expected in (
        ("running", None, True, "Starting (1 s)…"),
        ("failed", None, False, "The drill did not start: no space is left"),
        ("cancelled", None, False, ""),
        ("done", run, False, ""),
    ):
        job |= {"state": state, "answer": answer}
        found, markup = doctor_page.look_at_drill()
        assert found is busy and (expected in markup if expected else markup == ""), state
    write_run(data, "demo")
    assert '<a class="hp-link" href="?run=demo">' in doctor_page.look_at_drill()[1]
