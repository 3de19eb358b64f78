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
# Runs a command and prints which files of runs it opened.
WATCHED = """
import json, os, runpy, sys
opened, outputs = [], os.environ["HANGPROOF_DATA"] + os.sep + "outputs" + os.sep
sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" and str(args[0]).startswith(outputs) else None)
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print(json.dumps([path.removeprefix(outputs) for path in opened]), file=sys.stderr)
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
    ("words", "opened", "shown"),
    [
        ("runs show", {}, NUMBER),
        ("monitor status", EACH, NUMBER),
        ("monitor resume-all", {**EACH, ".queue.json": 1}, 0),
    ],
)
def test_a_command_shows_every_run_and_opens_each_file_once(data, words, opened, shown):
    env = {**os.environ, "HANGPROOF_DATA": str(data)}
    command = [sys.executable, "-c", WATCHED, *words.split(), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    files = json.loads(done.stderr.splitlines()[-1])
    assert Counter(Path(path).name for path in files) == opened and len(files) == len({*files})
    answer = json.loads(done.stdout.splitlines()[-1])
    assert len(answer["runs"] if words == "runs show" else answer) == shown
