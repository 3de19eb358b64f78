"""The probe: real processes with the tiny model, one of which hangs; and what it says about the stages."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import probe
from launch.common import LaunchError
from launch.probe import FAILS, HANGS, SLOW, TRAINS, Stage

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 500


def stage(outcome, processes=1, workers=0, text="It says so.", **said) -> Stage:
    made = next(s for s in [*probe.stages(1), *probe.stages(2)] if (s.processes, s.workers) == (processes, workers))
    made.outcome, made.text = outcome, text
    made.report = {"verdict": {"advice": "Do this.", **said}}
    return made


def test_three_stages_for_several_processes_and_two_for_one():
    assert [(s.processes, s.workers) for s in probe.stages(4)] == [(1, 0), (4, 0), (4, 1)]
    assert [(s.processes, s.workers) for s in probe.stages(1)] == [(1, 0), (1, 1)]


def test_the_verdict_names_the_first_stage_that_does_not_train():
    ok, text, advice = probe.verdict([stage(TRAINS), stage(TRAINS, 2), stage(TRAINS, 2, 1)])
    assert (ok, advice) == (True, "The run can start.") and "all train" in text
    ok, text, advice = probe.verdict([stage(TRAINS), stage(HANGS, 2), Stage("x", 2, 1)])
    assert not ok and advice == "Do this."
    assert text == "1 process, 0 loader workers: trains. 2 processes, 0 loader workers: stop. It says so."
    _, text, advice = probe.verdict([stage(TRAINS), stage(TRAINS, 2), stage(HANGS, 2, 1)])
    assert advice == "Use 0 data loader workers. Do this." and "2 processes, 0 loader workers: trains." in text
    ok, text, advice = probe.verdict([stage(FAILS), Stage("x", 2, 0)])
    assert not ok and text == "1 process, 0 loader workers: failed. It says so." and "probe again" in advice
    ok, _, advice = probe.verdict([stage(SLOW), stage(TRAINS, 2)])
    assert not ok and "--limit" in advice


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data root of its own, temporary files in a folder of its own, no GPU, and a hang that a test may choose."""
    for name, value in {
        "HANGPROOF_DATA": str(tmp_path / "data"), "TMPDIR": str(tmp_path / "tmp"), "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT), "HANGPROOF_INJECT": "benchmarks.ranks_group:fire",
        "HANGPROOF_MARK": str(tmp_path / "mark"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path


def nothing_is_left(root: Path) -> bool:
    """No process with this temporary folder, and no file in it or in the data root."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        living = [p for p in os.listdir("/proc") if p.isdecimal() and int(p) != os.getpid() and _uses(p, root)]
        if not living:
            break
        time.sleep(0.1)
    return not living and not list((root / "tmp").glob("hangproof-probe-*")) and not (root / "data").exists()


def _uses(pid: str, root: Path) -> bool:
    try:
        return str(root).encode() in Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return False


@pytest.mark.slow
def test_a_process_that_hangs_is_found_with_its_check_point_and_nothing_is_left(root, monkeypatch):
    monkeypatch.setenv("HANGPROOF_HANG", "0:network:sleeps")
    monkeypatch.setattr(probe, "QUIET_S", 2.0)
    seen: list[tuple[str, int, int, str]] = []
    answer = probe.probe(None, 1, progress=lambda s, number, of: seen.append((s.name, number, of, s.outcome)))
    first, second = answer["stages"]
    assert not answer["ok"] and "stopped at check point 5 (LoRA network)" in answer["verdict"], answer["verdict"]
    assert "memory" in answer["advice"]
    said = first["report"]["verdict"]
    assert (first["outcome"], said["point"], said["rank"]) == (HANGS, "network", 0)
    assert "sleeps (ranks_group.py" in said["text"] and any("sleeps (" in line for line in first["lines"])
    assert second["outcome"] == probe.SKIPPED and "Not tried" in second["text"]
    assert [s[1:] for s in seen] == [(1, 2, "skipped"), (1, 2, HANGS), (2, 2, "skipped")]
    assert os.environ["HANGPROOF_DATA"] == str(root / "data")
    assert nothing_is_left(root)
    json.dumps(answer)


def test_a_run_without_images_or_without_its_model_cannot_be_probed(root):
    from runs_helpers import pictures

    import runs

    folder = runs.create(
        runs.make({"name": "big", "trigger": "x", "model": "flux-dev", "backend": "diffusers"}),
        pictures(root / "pictures"),
    )
    with pytest.raises(LaunchError, match=r"cannot be started: .*"):
        probe.probe(folder, 1)
    assert not list((root / "tmp").glob("hangproof-probe-*"))


@pytest.mark.slow
def test_wrong_usage_and_unknown_runs_are_refused(root):
    def launch(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "launch", "probe", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert launch("--gpus", "-1").returncode == 1
    assert launch("--steps", "6").returncode == 2
    unknown = launch("no-such-run")
    assert unknown.returncode == 1 and "no run 'no-such-run'" in unknown.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="SIGTERM is Linux's and macOS's")
def test_a_probe_that_is_cancelled_leaves_nothing(root, monkeypatch):
    monkeypatch.setenv("HANGPROOF_HANG", "0:arguments:sleeps")
    command = [sys.executable, "-m", "launch", "probe", "--gpus", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + LIMIT_S
    while not (root / "mark").exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(LIMIT_S) != 0
    assert nothing_is_left(root)
