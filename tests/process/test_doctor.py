"""`./start.sh doctor` says what is ready, what is not, and what to do; each of kohya's trainers is started."""

import json
import os
import signal
import subprocess
import sys

import pytest
from runs_helpers import call

from doctor import end_orphan, left_over, orphans
from monitor.process import platform, spawned
from runs.files import RunError


def doctor(*flags: str, **environment: str) -> tuple[int, dict[str, dict], str]:
    """Its exit code, its findings by name, and its errors."""
    done = call("doctor", "--json", *flags, **environment)
    result = json.loads(done.stdout)
    assert result["ok"] == (done.returncode == 0)
    return done.returncode, {one["name"]: one for one in result["findings"]}, done.stderr


def test_an_orphan_is_listed_and_ended_with_what_it_started(data, monkeypatch):
    (data / "outputs" / "gone").mkdir(parents=True)
    code = "import subprocess; p = subprocess.Popen(['sleep', '60'], stdout=-3); print(p.pid, flush=True); p.wait()"
    env = {**os.environ, spawned.RUN: str(data / "outputs" / "gone"), spawned.TOKEN: "0" * 32}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    try:
        child = int(process.stdout.readline())
        found = {one["pid"]: one for one in orphans()}
        assert {found[process.pid]["run"], found[child]["run"]} == {"gone"}
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("HANGPROOF_DATA", str(data / "another"))
            left = [one.action for one in left_over() if f"pid {process.pid})" in one.text]
            assert left[0].endswith(f"python -m monitor stop {data / 'outputs' / 'gone'}."), "also a killed rehearsal's"
        with pytest.raises(RunError, match="has ended, or a monitor watches it"):
            end_orphan(process.pid, found[process.pid]["start"] + 1)
        assert "was ended" in end_orphan(process.pid, found[process.pid]["start"])
        assert process.wait(10) == -signal.SIGTERM and not platform.alive(child, found[child]["start"])
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.slow
def test_a_folder_that_is_no_trainer_does_not_start(tmp_path):
    for name in ("my s", "v/bin"):
        (tmp_path / name).mkdir(parents=True)
    folders = {"SD_SCRIPTS_DIR": "my s", "SD_SCRIPTS_VENV": "v", "MUSUBI_DIR": "no"}
    settings = {name: str(tmp_path / folder) for name, folder in folders.items()}
    code, found, _ = doctor(**settings)
    assert [found[name]["status"] for name in ("Python", "musubi-tuner")] == ["ok", "note"]
    assert code == 1 and found["sd-scripts start"]["status"] == "failed"
    assert found["sd-scripts guards"]["action"].endswith(f" check '{tmp_path / 'my s'}'")
    assert "flux_train_network.py cannot be started with " in found["sd-scripts start"]["text"]
    again = f"Delete {tmp_path / 'v'} and run ./start.sh sd-scripts."  # a start alone installs nothing again
    assert [found[f"sd-scripts {what}"]["action"] for what in ("Python", "start")] == [again, again]
