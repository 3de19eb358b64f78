"""Many runs on disk: every command shows them all, and reads no file twice."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from ui_helpers import metrics_line, write_history, write_run

from runs.paths import ROOT

NUMBER = 150
# Runs a command and prints which files of runs it opened and which modules it imported.
WATCHED = """
import json, os, runpy, sys
opened, outputs = [], os.environ["HANGPROOF_DATA"] + os.sep + "outputs" + os.sep
sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" and str(args[0]).startswith(outputs) else None)
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code
with open(os.environ["WATCHED"], "w") as file:
    json.dump({"code": code, "opened": [path.removeprefix(outputs) for path in opened], "modules": sorted(sys.modules)}, file)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("thousand")
    metrics = [metrics_line(step) for step in range(1, 41)]
    metrics += [metrics_line(step, attempt=2) for step in range(31, 101)]
    for number in range(NUMBER):
        run = write_run(folder, f"run-{number:03}", ("completed", "failed", "stopped")[number % 3], message="")
        (run / "train.sh").touch()
        write_history(run, price=0.4)
        (run / "metrics.jsonl").write_text("".join(metrics), encoding="utf-8")
        (run / "monitor.lock").touch()
    return folder


def run(data: Path, *words: str) -> tuple[list, Counter, list[str]]:
    """(the JSON that a command prints, how often it opened each kind of file, its modules)."""
    watched = data / "watched.json"
    env = {**os.environ, "HANGPROOF_DATA": str(data), "WATCHED": str(watched)}
    command = [sys.executable, "-c", WATCHED, *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(watched.read_text())
    assert seen["code"] == 0, done.stderr[-2000:]
    twice = [path for path, times in Counter(seen["opened"]).items() if times > 1]
    assert not twice, f"opened more than once: {twice[:5]}"
    kinds = Counter(Path(path).name for path in seen["opened"])
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if "--json" in words else lines, kinds, seen["modules"]


def test_the_list_opens_no_run(data):
    shown, kinds, modules = run(data, "runs", "show", "--json")
    assert len(shown["runs"]) == NUMBER and shown["runs"] == sorted(shown["runs"])
    assert not kinds and "pydantic" not in modules


def test_status_shows_every_run_with_its_ledger_and_opens_each_file_once(data):
    shown, kinds, modules = run(data, "monitor", "status", "--json")
    assert len(shown) == NUMBER and {one["state"] for one in shown} == {"completed", "failed", "stopped"}
    assert all(one["ledger"]["steps_trained_twice"] == 10 for one in shown)
    assert all(one["ledger"]["cost"] == pytest.approx(1100 / 3600 * 0.4, abs=0.001) for one in shown[:10])
    assert kinds == {"status.json": NUMBER, "monitor.lock": NUMBER}
    assert not {"pydantic", "rich", "torch"} & set(modules)


def test_without_json_status_reads_no_history_and_resume_all_finds_nothing(data):
    lines, kinds, _ = run(data, "monitor", "status")
    assert len([line for line in lines if line.startswith("run-")]) == NUMBER
    assert kinds == {"status.json": NUMBER, "monitor.lock": NUMBER}
    started, kinds, modules = run(data, "monitor", "resume-all", "--json")
    assert started == [] and kinds == {"status.json": NUMBER, "monitor.lock": NUMBER, ".queue.json": 1}
    assert "pydantic" not in modules
