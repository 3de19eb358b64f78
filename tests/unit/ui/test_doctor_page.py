"""The tab Doctor: what it asks and answers, whatever is sent to it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ui_helpers import write_run

import doctor
from runs.files import RunError
from ui import doctor_page, jobs

SCRIPT = "accelerate launch flux_train_network.py --blocks_to_swap 18 --split_mode --max_data_loader_n_workers 0\n"


def test_what_is_no_script_and_what_is_no_process_is_refused():
    for text, name in (
        ("", "train.sh"), ("x" * 300_000, "train.sh"), (SCRIPT, "../train.sh"), ("echo '\0\udcff`$(", "train.bat"),
    ):  # fmt: skip
        with pytest.raises(RunError):
            doctor_page.lint(text, name)
    for pid in ("", "0; rm -rf /", "999999999999"):
        with pytest.raises(RunError):
            doctor_page.explain(pid)


def test_a_report_has_no_home_no_token_and_no_password():
    home = str(Path.home())
    given_text = f"{home}/models https://me:secret@host/x hf_abcdefghijklmnop sk-1234567890abcdef"
    text = doctor_page.without_secrets(given_text)
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
        (found,) = doctor.file_system("runs", Path("/data/outputs"))
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
