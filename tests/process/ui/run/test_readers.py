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
    for number in range(NUMBER):
        run = write_run(folder, f"run-{number:03}", ("completed", "failed", "stopped")[number % 3], message="")
        (run / "train.sh").touch()
        write_history(run, price=0.4)
        (run / "metrics.jsonl").write_text(metrics_line(1))
        (run / "monitor.lock").touch()
    return folder


EACH = {"status.json": NUMBER, "monitor.lock": NUMBER}


@pytest.mark.parametrize(
    ("words", "opened", "unused"),
    [
        ("runs show --json", {}, {"pydantic"}),
        ("monitor status --json", EACH, {"pydantic", "rich", "torch"}),
        ("monitor status", EACH, set()),
        ("monitor resume-all --json", {**EACH, ".queue.json": 1}, {"pydantic"}),
    ],
)
def test_a_command_shows_every_run_opens_each_file_once_and_imports_little(data, words, opened, unused):
    watched = data / "watched.json"
    env = {**os.environ, "HANGPROOF_DATA": str(data), "WATCHED": str(watched)}
    command = [sys.executable, "-c", WATCHED, *words.split()]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(watched.read_text())
    assert seen["code"] == 0, done.stderr[-2000:]
    assert Counter(Path(path).name for path in seen["opened"]) == opened
    assert len(seen["opened"]) == len({*seen["opened"]}), "a file is opened once"
    assert not unused & {*seen["modules"]}
    lines = done.stdout.splitlines()
    shown = json.loads(lines[-1]) if "--json" in words else [line for line in lines if line.startswith("run-")]
    if words == "runs show --json":
        assert len(shown["runs"]) == NUMBER and shown["runs"] == sorted(shown["runs"])
    else:
        assert len(shown) == (0 if "resume-all" in words else NUMBER)
    if words == "monitor status --json":
        assert {one["state"] for one in shown} == {"completed", "failed", "stopped"}
        assert all(one["ledger"]["steps_trained_twice"] == 10 for one in shown)
        assert all(one["ledger"]["cost"] == pytest.approx(1100 / 3600 * 0.4, abs=0.001) for one in shown[:10])
