"""monitor/run_folder.py: which of several machines this is, and where its monitor writes."""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

import pytest
from monitor_helpers import wait_for

from monitor import run_folder
from monitor.run_folder import SCRIPT, MonitorError, RunFolder, find, machine_number, machines
from runs import env_file

NODE = "HANGPROOF_NODE"
NUMBERS = {  # `nodes` of the spec (None: a script of the user's own), the variable: the machine, or a part of the error
    "one machine": (1, {}, None),
    "one machine, and the variable is left over": (1, {NODE: "1"}, None),
    "the first of two": (2, {NODE: "0"}, 0),
    "the second of two": (2, {NODE: "1"}, 1),
    "no variable": (2, {}, "trains on several machines, and HANGPROOF_NODE='' is not the number of one"),
    "one too many": (2, {NODE: "2"}, "HANGPROOF_NODE='2'"),
    "no number": (2, {NODE: "../x"}, "docs/machines.md"),
    "an own script": (None, {}, None),
    "an own script on several": (None, {NODE: "3"}, 3),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_the_number_of_a_machine(what, tmp_path):
    nodes, environ, expected = NUMBERS[what]
    if nodes:
        (tmp_path / "run.toml").write_text(f'name = "cat"\nnodes = {nodes}\n')
    if isinstance(expected, str):
        with pytest.raises(MonitorError, match=expected):
            machine_number(tmp_path, environ)
    else:
        assert machine_number(tmp_path, environ) == expected


def test_another_machine_writes_into_a_folder_of_its_own_and_has_neither_store_nor_spend_limit(tmp_path):
    (tmp_path / "run.toml").write_text('name = "cat"\nnodes = 12\nstore = "s3://x"\nspend_limit = 5\n')
    first = RunFolder(tmp_path, machine=0)
    assert first.own == tmp_path and first.spec["store"] == "s3://x"
    for number in (2, 10):
        other = RunFolder(tmp_path, machine=number)
        other.own.mkdir(parents=True)
        other.log("here")
        other.write_status({"state": "running", "step": number, "secret": "x"})
        assert not other.spec["store"] and not other.spec["spend_limit"]
        (other.own / "incidents" / "0001").mkdir(parents=True)
        assert other.incident_numbers() == [1] and not first.incident_numbers()
    assert not (tmp_path / "status.json").exists() and (tmp_path / "machines" / "2" / "monitor.log").is_file()
    found = machines(tmp_path)
    assert [(one["machine"], one["step"]) for one in found] == [("2", 2), ("10", 10)]
    assert {one["state"] for one in found} == {"running"}
    assert "secret" not in json.dumps(found)
    (tmp_path / "run.toml").unlink()
    assert RunFolder(tmp_path, machine=2).foreign


def test_a_run_is_found_by_its_folder_or_its_name_and_one_without_a_script_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    folder = tmp_path / "outputs" / "My-LoRA"
    folder.mkdir(parents=True)
    for name in (folder, "no-such-run", "~no-such-user"):
        with pytest.raises(MonitorError, match=SCRIPT):
            find(name)
    (folder / "run.toml").write_text('name = "My LoRA"\n')
    with pytest.raises(MonitorError, match="is missing; write it with `python -m runs render My-LoRA`"):
        find("My LoRA")
    (folder / SCRIPT).touch()
    assert find(folder) == find("My-LoRA") == find("My LoRA") == folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_replaced_file_of_a_run_is_synced_with_its_folder(tmp_path, monkeypatch):
    """`monitor.json`: without that, a power cut after "saved" brings the old file back."""
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    assert RunFolder(tmp_path).replace("monitor.json", "{}", sync=True)
    assert synced[-1] == str(tmp_path) and len(synced) == 2


def test_the_log_of_a_training_is_read_from_its_attempt_on_and_marked(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    folder = RunFolder(tmp_path)
    assert folder.log_size() == 0 and folder.log_tail(0, 100) == ""
    (tmp_path / "training.log").write_bytes(b"before|of this attempt")
    assert folder.log_size() == 22
    assert folder.log_tail(7, 100) == "of this attempt" and folder.log_tail(7, 4) == "empt"
    (tmp_path / "run.toml").write_text('secrets = ["WANDB_API_KEY"]')
    env_file.write(tmp_path, {"WANDB_API_KEY": "0123456789abcdef"})
    (tmp_path / "training.log").write_bytes(b"refused: 0123456789abcdef\n0123456789abcdef")
    with_secrets = RunFolder(tmp_path)
    monkeypatch.delattr("runs.env_file")
    monkeypatch.setitem(sys.modules, "runs.env_file", None)  # an update replaced it while the run trains
    assert with_secrets.log_tail(0, 25) == "(WANDB_API_KEY)", "no rest of one that was cut"
    folder.mark_log("stopped")
    last = (tmp_path / "training.log").read_text().splitlines()[-1]
    assert last.startswith("=== 20") and last.endswith("Z stopped"), "a line of its own"
    (tmp_path / "training.log").unlink()
    (tmp_path / "training.log").mkdir()
    folder.mark_log("nothing happens")


def test_a_request_to_stop_is_there_until_it_is_cleared_and_one_of_before_goes(tmp_path):
    folder, request = RunFolder(tmp_path), tmp_path / "stop.request"
    assert folder.stop_request() is None
    folder.clear_stop_request()
    for text, read in (("{", {}), ('{"now": true}', {"now": True})):
        request.write_text(text)
        assert folder.stop_request() == read
    folder.clear_stop_request(before_s=time.time() - 60)
    assert request.exists(), "made since"
    folder.clear_stop_request(before_s=time.time() + 60)
    assert not request.exists()


def test_the_job_decides_what_is_trained_and_the_file_what_it_costs(tmp_path):
    assert run_folder.read_spec(tmp_path) == {} and RunFolder(tmp_path).name == tmp_path.name
    (tmp_path / "run.toml").write_text('\ufeffname = "new"\nspend_limit = 5\n', encoding="utf-8")
    assert run_folder.read_spec(tmp_path) == {"name": "new", "spend_limit": 5}
    (tmp_path / "job.json").write_text(json.dumps({"spec": {"name": "made", "rank": 8, "spend_limit": 1}}))
    assert RunFolder(tmp_path).spec == {"name": "made", "rank": 8, "spend_limit": 5}
    (tmp_path / "run.toml").write_text("a = " + "[" * 50_000)  # too deep for its parser
    assert RunFolder(tmp_path).spec == {"name": "made", "rank": 8, "spend_limit": 1}
    (tmp_path / "job.json").write_text(json.dumps({"spec": {"name": "made", "gpus": "one", "nodes": [2]}}))
    assert RunFolder(tmp_path).spec == {"name": "made"} and machine_number(tmp_path, {NODE: "0"}) is None


def test_an_event_is_kept_logged_and_passed_on_and_a_full_disk_is_said_once_a_line(tmp_path, capfd):
    folder, passed = RunFolder(tmp_path, echo=True), []
    folder.on_event = lambda *event: passed.append(event)
    folder.event("hang", "it hangs", step=3)
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["kind"], event["message"], event["step"]) == ("hang", "it hangs", 3) and event["mono_s"] > 0
    assert passed == [("hang", "it hangs")]
    assert (tmp_path / "monitor.log").read_text() == capfd.readouterr().err
    for name in ("0007", "²", "old"):
        (tmp_path / "incidents" / name).mkdir(parents=True)
    assert folder.incident_numbers() == [7]
    folder.own = tmp_path / "gone"
    assert not folder.replace("x", "y") and folder.log("z") is None
    assert capfd.readouterr().err.count("cannot write") == 2
    assert folder.incident_numbers() == []


@pytest.mark.parametrize(("queue", "begun"), [(None, 0), ({"entries": []}, 0), ({"entries": ["x"]}, 1)])
def test_the_queue_is_woken_where_a_run_waits(tmp_path, monkeypatch, queue, begun):
    (tmp_path / "outputs").mkdir()
    if queue is not None:
        (tmp_path / "outputs" / ".queue.json").write_text(json.dumps(queue))
    commands = []
    monkeypatch.setattr(run_folder, "helper", lambda command, out: commands.append(command[1:]))
    assert run_folder.wake_queue(tmp_path / "outputs") is bool(begun)
    assert commands == [["-m", "jobs", "queue", "work"]] * begun


def test_a_line_that_nobody_takes_is_dropped_and_where_messages_go_is_named(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    with open(writer, "w") as stream:
        run_folder.print_line("nobody reads", stream)
        os.read(reader, 1 << 20)
        run_folder.print_line("x" * 2000, stream)
        assert os.read(reader, 1 << 20) == b"x" * 1000 + b"\n"
    run_folder.print_line("closed", stream)
    run_folder.print_line("no descriptor", io.StringIO())
    os.close(reader)
    monkeypatch.setenv("HANGPROOF_NOTIFY", "~/mine.toml")
    assert run_folder.notify_file() == Path.home() / "mine.toml"


def test_a_message_that_cannot_be_sent_is_logged_with_what_the_sender_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_NOTIFY", str(tmp_path / "notify.toml"))
    monkeypatch.setattr(run_folder, "python", lambda module: ["sh", "-c", "cat; exit ${CODE:-2}"])
    folder = RunFolder(tmp_path)
    notifier = run_folder.Notifier("toy", folder.log)
    notifier.event("hang", "nothing is configured")
    notifier.poll(30)
    (tmp_path / "notify.toml").touch()
    notifier.event("crash", "x" * 600)
    monkeypatch.setenv("CODE", "0")
    notifier.event("failed", "sent")
    notifier.poll(30)
    (line,) = (tmp_path / "monitor.log").read_text().splitlines()
    said = line.partition("notification of crash: ")[2]
    assert said.startswith('{"kind": "crash", "title": "toy: crash", "body": "xxx') and len(said) == 500
    notifier.poll(30)
    notifier.event("hang", "this one takes longer")
    notifier.poll()
    notifier.poll(30)


def test_messages_that_hang_are_a_few_processes_and_do_not_delay_the_last_one_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_NOTIFY", str(tmp_path / "notify.toml"))
    (tmp_path / "notify.toml").touch()
    script = f"grep -q completed && touch {tmp_path}/sent || exec sleep 300"
    monkeypatch.setattr(run_folder, "python", lambda module: ["sh", "-c", script])
    notifier = run_folder.Notifier("toy", print)
    notifier.event("phase", "nobody asked for this")
    assert not notifier._sending
    for number in range(30):
        notifier.event("hang", f"{number}")
    notifier.event("completed", "the last one")
    notifier.poll()
    assert len(notifier._sending) == run_folder.SENDERS
    notifier.poll(0.1)
    assert len(notifier._sending) <= 2 * run_folder.SENDERS
    try:
        wait_for((tmp_path / "sent").exists, what="the last message")
    finally:
        for _, job in notifier._sending:
            job.kill()
