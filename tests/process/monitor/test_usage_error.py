"""A script that can never start, behind a real launcher: never retried, and its own line leads."""

import sys

import pytest
from monitor_helpers import supervise
from run_facts import incidents, report, status
from runs_helpers import PROJECT

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


def failed(folder, script: str, cause: str, line: str) -> None:
    """Assert that the run with this script fails at once, with this cause, and that the report begins with this line."""
    folder.mkdir()
    (folder / "train.sh").write_text(script)
    code, _, err = supervise(folder)
    assert code == 1, err
    now, log = status(folder), (folder / "training.log").read_text().splitlines()
    assert (now["state"], now["restarts"]) == ("failed", 0) and line in now["message"]
    assert sum(" attempt " in text for text in log) == 1 and log[-1].startswith("=== ") and line in log[-1]
    assert [one["cause"] for one in incidents(folder)] == [cause]
    assert line in report(folder).split("## Likely cause")[1].strip().splitlines()[0]


@pytest.mark.slow
def test_the_error_of_a_script_of_kohyas_leads(folder, tmp_path):
    script = tmp_path / "flux_train_network.py"
    script.write_text(KOHYA)
    accelerate = venv_program(PROJECT / ".venv", "accelerate")
    if not accelerate.is_file():
        pytest.skip("no accelerate in .venv: run ./start.sh once")
    launch = f"{accelerate} launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    text = f"exec {launch} --num_cpu_threads_per_process 1 {script} --optimizer_type nope --training_comment '{LONG}'\n"
    line = "flux_train_network.py: error: argument --optimizer_type: invalid choice: 'nope' (choose from 'AdamW', 'Adafactor')"
    failed(folder, text, "usage_error", line)


def test_a_script_that_was_deleted_stops_the_run_at_once(folder):
    script = f"exec {sys.executable} /no/such/place/flux_train_network.py --seed 1\n"
    failed(folder, script, "cannot_start", "can't open file '/no/such/place/flux_train_network.py'")
    assert "./start.sh sd-scripts" in report(folder)
