"""What people and programs read: status, live table, metrics, messages, explanations."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from loopback import answering
from monitor_helpers import ROOT, environment, finish, monitor, supervise, toy_run, wait_for
from run_facts import status, step_of
from toys import HANG, SHORT, fault_at

from monitor.cli import commands, metrics, notify
from monitor.process.platform import Lock
from monitor.run_folder import MonitorError, RunFolder, find
from monitor.state import is_abandoned, read_status

LINUX = sys.platform.startswith("linux")


def test_a_folder_without_a_script_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    with pytest.raises(MonitorError, match="train.sh"):
        find(tmp_path)
    folder = toy_run(tmp_path / "outputs" / "my-lora")
    assert find(folder) == find("my-lora") == folder
    code, _, err = finish(monitor(Path("no-such-run"), "status", HANGPROOF_DATA=str(tmp_path)))
    assert code == 1 and "no-such-run" in err


def test_status_says_whether_somebody_watches(tmp_path):
    files = RunFolder(tmp_path)
    assert read_status(tmp_path) is None
    files.write_status({"state": "running", "name": "x"})
    assert read_status(tmp_path)["alive"] is False and is_abandoned(read_status(tmp_path))
    lock = Lock(tmp_path / "monitor.lock")
    lock.acquire()
    assert read_status(tmp_path)["alive"] is True
    lock.release()
    files.write_status({"state": "completed", "name": "x"})
    assert not is_abandoned(read_status(tmp_path))


STATUS = {
    "name": 'my "lora"', "state": "running", "alive": True, "step": 12, "planned_steps": 100, "step_s": 0.5,
    "loss": 0.25, "eta_s": 44.0, "attempt": 2, "restarts": 1, "incidents": 1, "phase": "step", "epoch": 1,
    "last_progress_at": "2026-01-02T03:04:05.500Z", "updated_at": "2026-01-02T03:04:06.000Z", "message": "",
}  # fmt: skip


def test_prometheus_text_names_every_run_and_escapes_its_name():
    page = metrics.text([STATUS])
    assert 'hangproof_step{run="my \\"lora\\""} 12\n' in page
    assert 'hangproof_state{run="my \\"lora\\"",state="running"} 1\n' in page
    assert 'hangproof_state{run="my \\"lora\\"",state="failed"} 0\n' in page
    assert "# TYPE hangproof_restarts_total counter\n" in page
    assert 'hangproof_last_progress_timestamp_seconds{run="my \\"lora\\""} 1767323045.5' in page
    assert metrics.text([]) == "\n"


def test_metrics_are_served_on_this_machine_only_and_other_paths_say_so(tmp_path):
    folder = toy_run(tmp_path / "outputs" / "toy")
    RunFolder(folder).write_status({**STATUS, "name": "toy"})
    command = [sys.executable, "-m", "monitor", "metrics", "--port", "0", "--json"]
    env = environment(folder, HANGPROOF_DATA=str(tmp_path))
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        port = json.loads(process.stdout.readline())["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert 'hangproof_step{run="toy"} 12' in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
        listening = [c.laddr.ip for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
    finally:
        process.kill()
        process.communicate()


def test_the_runs_are_shown_until_all_have_ended(tmp_path, capsys):
    folder = toy_run(tmp_path / "toy")
    RunFolder(folder).write_status(STATUS)
    assert commands.watch([folder, tmp_path / "other"], 0.0) == 0
    shown = capsys.readouterr().out
    assert "step 12 of 100" in shown and "not watched" in shown and "other: not started" in shown


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="/proc")
def test_diagnose_explains_a_living_run_and_any_process(folder):
    toy_run(folder, fault_at(5, "time.sleep(3600)"))
    process = monitor(folder, limits="[phases.step]\nfloor_s = 600\n[check]\nstack_dump_s = 20\n")
    wait_for(lambda: step_of(folder) == 5)
    code, out, _ = finish(monitor(folder, "diagnose", "--json"))
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found["summary"] == "no progress" and found["step"] == 5
    assert "fault (toy.py" in found["where"] and "fault" in out
    pid, limits = found["processes"][-1]["pid"], str(folder.parent / "limits.toml")
    code, out, _ = finish(monitor(Path(str(pid)), "diagnose", HANGPROOF_LIMITS=limits))
    assert code == 0 and "no progress" in out and "hrtimer_nanosleep" in out
    (folder / "stop.request").write_text('{"now": true}')
    finish(process)
    assert status(folder)["state"] == "stopped"
    code, _, err = finish(monitor(folder, "diagnose"))
    assert code == 1 and "nothing of it runs" in err


@pytest.mark.slow
def test_people_are_notified_of_a_hang_and_of_the_end_and_their_addresses_stay_secret(folder):
    """A server that keeps what it is sent stands in for a chat service."""
    got, config = [], folder.parent / "notify.toml"
    toy_run(folder, HANG, **SHORT)
    with answering(lambda request: got.append(request.body.decode()) or (200, "")) as server:
        config.write_text(f'urls = ["json://user:s3cr3t-token@127.0.0.1:{server.server_port}/"]\n')
        config.chmod(0o600)
        assert supervise(folder, HANGPROOF_NOTIFY=str(config))[0] == 0
        wait_for(lambda: len(got) >= 3)  # a helper that has begun to send goes on without the monitor
    assert sorted(json.loads(text)["title"] for text in got) == ["toy: completed", "toy: hang", "toy: restarted"]
    for path in folder.rglob("*"):
        assert not path.is_file() or b"s3cr3t-token" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [('urls = ["json://s3cr3t"]\n', 0o644, "chmod 600"), ("urls = [json://s3cr3t", 0o600, "not a TOML file")],
)
def test_a_notification_file_that_is_refused_is_not_shown(tmp_path, text, mode, problem):
    config = tmp_path / "notify.toml"
    config.write_text(text)
    config.chmod(mode)
    with pytest.raises(notify.MonitorError, match=problem) as refused:
        notify.read_config(config)
    assert "s3cr3t" not in str(refused.value)
