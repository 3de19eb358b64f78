"""Every attempt of a real run is its job.json, whatever the tables or run.toml say since."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ladder_runs import CRASHES, TRAINER
from monitor_helpers import ROOT, environment, events, finish, wait_for
from run_facts import status
from runs_helpers import executable, pictures

from monitor.state import spec_edited

pytestmark = pytest.mark.slow
PARTS = ("guards", "monitor", "presets", "runs")
# It notes its arguments, refuses a state of another optimizer as a real one does, and fails in attempt 1 once it may.
KEEN = """
attempt = os.environ["HANGPROOF_ATTEMPT"]
Path(os.environ["NOTES"], f"arguments-{attempt}.json").write_text(json.dumps(sys.argv[1:]))
if args.resume and (args.resume / "optimizer.txt").read_text() != args.optimizer_type:
    sys.exit("the state has another optimizer")
hb.plan(40)"""
WAITS = """
if attempt == "1":
    Path(os.environ["NOTES"], "at-25").touch()
    while not Path(os.environ["NOTES"], "go").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), 9)
"""


class Program:
    """A copy of Hangproof that can be updated, and a run made with it."""

    def __init__(self, place: Path):
        self.place, self.root, self.data = place, place / "program", place / "data"
        for part in PARTS:
            shutil.copytree(ROOT / part, self.root / part, ignore=shutil.ignore_patterns("__pycache__"))
        (place / "trainer.py").write_text(TRAINER.replace("\nhb.plan(STEPS)", KEEN).replace(str(ROOT), str(self.root)))
        (place / "limits.toml").write_text(CRASHES)
        program = executable(place / "python", f'#!/bin/sh\nexec {sys.executable} {place}/trainer.py "$@"\n')
        self.folder = self.data / "outputs" / "cat"
        more = {"HANGPROOF_DATA": str(self.data), "TRAINER_PYTHON": str(program), "NOTES": str(place)}
        self.data.mkdir()
        self.env = environment(self.data, **more, TOY_FAULT=WAITS, HANGPROOF_LIMITS=str(place / "limits.toml"))
        images = pictures(place / "in", 2)
        words = ("--images", images, "--model", "tiny-flux", "--set", "max_train_steps=40")
        self.call("runs", "new", "--name", "cat", *words)

    def call(self, module: str, *arguments: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        done = subprocess.run(command, cwd=self.root, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    def train(self, meanwhile) -> None:
        """Supervise the run; `meanwhile` is called while attempt 1 waits for its crash."""
        command = [sys.executable, "-m", "monitor", "run", "cat"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=self.root, env=self.env, stdout=pipe, stderr=pipe, text=True)
        wait_for((self.place / "at-25").exists, 120)
        meanwhile()
        (self.place / "go").touch()
        code, _, err = finish(process)
        assert code == 0, (status(self.folder), err[-2000:], (self.folder / "training.log").read_text()[-2000:])

    def arguments(self, attempt: int) -> list[str]:
        """What the trainer got, without where it resumed from."""
        words = json.loads((self.place / f"arguments-{attempt}.json").read_text())
        if "--resume" in words:
            at = words.index("--resume")
            assert "-step00000020-state" in words[at + 1]
            del words[at : at + 2]
        return words

    def update(self) -> None:
        """Another version: tiers have another optimizer."""
        path = self.root / "presets" / "tables.py"
        path.write_text(path.read_text().replace('"optimizer_type", "adamw8bit"', '"optimizer_type", "prodigy"'))


def test_neither_an_update_nor_an_edit_after_a_crash_changes_an_attempt_until_the_run_is_made_again(tmp_path):
    program = Program(tmp_path)
    path = program.folder / "run.toml"
    assert "\nrank = 4\n" in path.read_text()
    path.write_text(path.read_text().replace("\nrank = 4\n", "\nrank = 64\n"))

    def meanwhile() -> None:
        program.update()
        path.write_text(path.read_text().replace("\nlearning_rate = ", "\nlearning_rate = 1"))

    program.train(meanwhile)
    assert program.arguments(2) == program.arguments(1) and not {"prodigy", "64"} & set(program.arguments(2))
    assert status(program.folder)["restarts"] == 1 and not list(program.folder.glob("*.bad"))
    (said,) = [e["message"] for e in events(program.folder) if "run.toml was edited" in e["message"]]
    assert "python -m runs render cat" in said
    before = (program.folder / "job.json").read_bytes()
    said = program.call("runs", "render", "cat").stderr
    assert "changed: --network_dim: 4 → 64" in said and " → prodigy" in said and "cannot go on from its states" in said
    script = (program.folder / "train.sh").read_text()
    assert "--optimizer_type prodigy" in script and "--network_dim 64" in script
    assert (program.folder / "job.json").read_bytes() != before and not spec_edited(program.folder)
