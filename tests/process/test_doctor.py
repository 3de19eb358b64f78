"""`./start.sh doctor` says what is ready, what is not, and what to do; the self-tests are part of it."""

import json
import os
import signal
import subprocess
import sys

import pytest
from runs_helpers import call

import doctor_tools
from doctor import self_test
from monitor.process import platform, tree
from runs.files import RunError
from sd_scripts_patches.trainers import TRAINERS


def doctor(*flags: str, **environment: str) -> tuple[int, dict[str, dict], str]:
    """Its exit code, its findings by name, and its errors."""
    done = call("doctor", "--json", *flags, **environment)
    result = json.loads(done.stdout)
    assert result["ok"] == (done.returncode == 0)
    return done.returncode, {one["name"]: one for one in result["findings"]}, done.stderr


def test_an_orphan_is_listed_and_ended_with_what_it_started(data):
    (data / "outputs" / "gone").mkdir(parents=True)
    code = (
        "import subprocess, time; p = subprocess.Popen(['sleep', '60'], stdout=-3); print(p.pid, flush=True); p.wait()"
    )
    env = {**os.environ, tree.RUN: str(data / "outputs" / "gone"), tree.TOKEN: "0" * 32}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    try:
        child = int(process.stdout.readline())
        found = {one["pid"]: one for one in doctor_tools.orphans()}
        assert {found[process.pid]["run"], found[child]["run"]} == {"gone"}
        with pytest.raises(RunError, match="not an orphan"):
            doctor_tools.end_orphan(process.pid, found[process.pid]["start"] + 1)
        assert "was ended" in doctor_tools.end_orphan(process.pid, found[process.pid]["start"])
        assert process.wait(10) == -signal.SIGTERM and not platform.alive(child, found[child]["start"])
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.slow
def test_a_folder_that_is_no_trainer_fails_its_self_test(tmp_path):
    for name in ("s", "v/bin"):
        (tmp_path / name).mkdir(parents=True)
    settings = {
        "SD_SCRIPTS_DIR": str(tmp_path / "s"),
        "SD_SCRIPTS_VENV": str(tmp_path / "v"),
        "MUSUBI_DIR": str(tmp_path / "no"),
    }
    code, found, _ = doctor(**settings)
    assert [found[name]["status"] for name in ("Python", "musubi-tuner")] == ["ok", "note"]
    assert code == 1 and found["sd-scripts self-test"]["status"] == "failed"
    assert f"selftest {tmp_path / 's'}" in found["sd-scripts self-test"]["action"]


def test_the_self_test_of_an_installed_trainer_is_part_of_it(monkeypatch):
    """tests/upstream/test_selftest.py has the real one."""
    trainer = TRAINERS["musubi"]
    checks = [
        {"name": "train", "status": "ok"},
        {"name": "hang", "status": "failed", "text": "no guard", "action": "Stop."},
    ]
    result = {"checks": checks, "ok": False, "seconds": 61.2}
    monkeypatch.setattr("doctor.machine.ask", lambda *command, **where: result)
    hang, end = self_test(trainer)
    assert (hang.name, hang.status, hang.text, hang.action) == ("musubi-tuner hang", "failed", "no guard", "Stop.")
    assert (end.status, end.action) == ("failed", "Run ./start.sh musubi.")
    result |= {"checks": checks[:1], "ok": True}
    (end,) = self_test(trainer)
    assert (end.name, end.status) == ("musubi-tuner self-test", "ok") and "(61 s)" in end.text
