"""The hang drill is a run of its own, and says what became of it; tests/campaigns/test_short_runs.py has a real one."""

import argparse
import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
from runs_helpers import call, pictures

import runs
from launch import drill


@pytest.fixture
def demo(data, monkeypatch):
    """Run the command: its monitor says SAID, then the status is `status`; the LoRA loads where `loads`."""

    def demo(status: dict, loads: bool = True, wait: bool = True) -> int:
        def command(*words: str) -> list[str]:
            assert words[:2] == ("monitor", "run")
            folder = Path(words[2])
            (folder / "status.json").write_text(json.dumps(status))
            (folder / f"{folder.name}.safetensors").write_bytes(b"lora")
            return [sys.executable, "-c", f"import sys; sys.stderr.write({SAID!r})"]

        monkeypatch.setattr(drill, "python", command)
        monkeypatch.setattr(drill, "write_examples", pictures)  # those take a second
        monkeypatch.setattr(drill, "LOAD_LORA", f"import sys\nprint({int(loads)} if 'demo' in sys.argv[2] else 0)")
        with mock.patch.dict(os.environ):
            code = drill.run(argparse.Namespace(no_wait=not wait, json=True))
            assert os.environ["HANGPROOF_FAULT_STEP"] == str(drill.FREEZE_AT)
        return code

    return demo


SAID = "10:00 hang: step 72 hangs\n10:01 note: hidden\n10:02 killed: 3 processes\n"
ENDED = {"state": "completed", "restarts": 1, "step": 100, "planned_steps": 100}


@pytest.mark.parametrize(
    ("status", "loads", "code"),
    [(ENDED, True, 0), (ENDED, False, 1), ({**ENDED, "restarts": 0}, True, 1), ({**ENDED, "state": "failed"}, True, 1)],
)
def test_a_drill_is_good_after_one_recovery_and_with_a_lora_that_loads(demo, capfd, status, loads, code):
    assert demo(status, loads) == code
    out, err = capfd.readouterr()
    assert "Detected: step 72 hangs\nKilled: 3 processes\nLoRA: " in out and "hidden" not in out
    found = json.loads(out.splitlines()[-1])
    assert (found["loads_in_diffusers"], found["steps"], found["run"]) == (loads, 100, "demo")
    assert found["lora"].endswith("demo.safetensors") and found["wall_s"] >= 0
    assert bool(err) == bool(code) and (not code or f"the run ended as {status['state']}; read" in err)
    assert runs.load(runs.run_folder("demo")).max_train_steps == drill.STEPS


def test_a_drill_is_a_run_of_its_own_and_can_leave_the_rest_to_the_page(demo, monkeypatch, capsys):
    assert call("launch", "drill", "my-run").returncode == 2 and runs.list_runs() == []
    started = []
    monkeypatch.setattr(drill, "start_monitor", lambda folder: started.append((folder, os.environ["HANGPROOF_FAULT"])))
    for method in ("fork", "forkserver"):  # whose workers do not inherit the fault
        monkeypatch.setattr(drill.multiprocessing, "get_start_method", lambda method=method: method)
        assert demo({}, wait=False) == 0
    assert started == [(runs.run_folder("demo"), "worker_sleeps"), (runs.run_folder("demo-2"), "step_sleeps")]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["folder"] == str(started[-1][0])
