"""A usage error of a trainer, in real processes behind a real launcher: never retried, and its own line leads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs_helpers import PROJECT, pictures, spec

import runs
from runs import job, pin
from runs.paths import venv_program

# The parser of sd-scripts as far as it matters here: argparse's own error, with the usage of many options before it.
KOHYA = """
import argparse
parser = argparse.ArgumentParser()
for n in range(200):
    parser.add_argument(f"--option_{n}")
parser.add_argument("--optimizer_type", choices=["AdamW", "Adafactor"])
parser.add_argument("--training_comment")
parser.parse_args()
"""
LONG = "word " * 1200  # longer than the part of a line that is searched


def supervise(folder: Path) -> dict:
    """Run the monitor until it ends; what the run's folder says then."""
    done = subprocess.run(
        [sys.executable, "-m", "monitor", "run", str(folder)], cwd=PROJECT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    incidents = sorted((folder / "incidents").iterdir())
    return {
        "status": json.loads((folder / "status.json").read_text()),
        "log": (folder / "training.log").read_text().splitlines(),
        "incidents": [json.loads((one / "incident.json").read_text()) for one in incidents],
        "report": (incidents[0] / "report.md").read_text(),
    }


def check(found: dict, line: str) -> None:
    assert found["status"]["restarts"] == 0 and found["status"]["state"] == "failed"
    assert sum(" attempt " in text for text in found["log"]) == 1
    assert [one["cause"] for one in found["incidents"]] == ["usage_error"]
    after = found["report"].split("## Likely cause")[1].strip().splitlines()[0]
    assert after == f"{line}."
    assert found["log"][-1].startswith("=== ") and line in found["log"][-1]
    assert line in found["status"]["message"]


@pytest.mark.slow
def test_the_built_in_trainers_error_leads(data, tmp_path):
    wanted = spec(model="tiny-flux")
    folder = runs.create(wanted, pictures(tmp_path / "in"))
    changed = wanted.changed(extra={"optimizer_type": "nonsense", "training_comment": LONG})
    runs.save(folder, changed)
    pin.write(folder, job.made(job.resolve(changed, folder), (folder / "run.toml").read_bytes()))
    check(supervise(folder), "error: --optimizer_type nonsense: not supported; use adafactor or adamw8bit or adamw")


@pytest.mark.slow
def test_the_error_of_a_script_of_kohyas_leads(data, tmp_path):
    folder = data / "outputs" / "kohya"
    folder.mkdir(parents=True)
    script = tmp_path / "flux_train_network.py"
    script.write_text(KOHYA)
    accelerate = venv_program(PROJECT / ".venv", "accelerate")
    if not accelerate.is_file():
        pytest.skip("no accelerate in .venv: run ./start.sh once")
    launch = f"{accelerate} launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    text = f"exec {launch} --num_cpu_threads_per_process 1 {script} --optimizer_type nope --training_comment '{LONG}'\n"
    (folder / "train.sh").write_text(text)
    line = "flux_train_network.py: error: argument --optimizer_type: invalid choice: 'nope' (choose from 'AdamW', 'Adafactor')"
    check(supervise(folder), line)


def test_a_script_that_was_deleted_stops_the_run_at_once(data):
    folder = data / "outputs" / "gone"
    folder.mkdir(parents=True)
    (folder / "train.sh").write_text(f"exec {sys.executable} /no/such/place/flux_train_network.py --seed 1\n")
    found = supervise(folder)
    assert found["status"]["restarts"] == 0 and found["status"]["state"] == "failed"
    assert [one["cause"] for one in found["incidents"]] == ["cannot_start"]
    assert "can't open file '/no/such/place/flux_train_network.py'" in found["status"]["message"]
    assert "./start.sh sd-scripts" in found["report"]
