"""`python -m launch slurm`: the script as text, and on a real Slurm that takes the job away in every way it can.

The run is the toy of monitor_helpers, whose result depends on every step; one is the built-in trainer on its tiny model.
"""

import json
import re
import subprocess
import sys
from collections import Counter

import pytest
import slurm_cluster
from monitor_helpers import (
    ROOT,
    environment,
    events,
    status,
    step_of,
    toy_run,
    undisturbed,
    wait_for,
    weight,
)

SHORT = dict(steps=60, pace=0.05, every=20)
real = pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-")


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster.cluster() as running:
        yield running


def launch(cluster, folder, *words, code=0, **env):
    """`python -m launch slurm FOLDER …` on the cluster: its line of JSON, or its standard error where it has to fail."""
    command = [sys.executable, "-m", "launch", "slurm", str(folder), "--json", *words]
    more = {name: cluster.environment[name] for name in ("PATH", "SLURM_CONF")} if cluster else {}
    done = subprocess.run(
        command, cwd=ROOT, env=environment(folder) | more | env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else json.loads(done.stdout.splitlines()[-1])


def submit(cluster, folder, *words, **env):
    """Submit the run; the job's number."""
    return launch(cluster, folder, "--partition", "main", "--submit", *words, **env)["job"]


def log(folder, job):
    return (folder / f"slurm-{job}.log").read_text(encoding="utf-8")


def repeated(folder):
    """How many steps were done twice or more."""
    steps = Counter(re.findall(r"^step (\d+)$", (folder / "training.log").read_text(), re.M))
    return sum(count - 1 for count in steps.values())


def at_step(folder, step):
    wait_for(lambda: step_of(folder) >= step, what=f"step {step}")


def completed(cluster, folder, job, starts, steps=SHORT["steps"]):
    """Assert that the job and the run completed with the result of an undisturbed one, and nothing of them is left."""
    now = cluster.wait_state(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
    text = log(folder, job)
    assert (now["JobState"], now["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert status(folder)["state"] == "completed" and weight(folder) == undisturbed(steps)
    assert int(now["Restarts"]) == starts - 1, text
    wait_for(lambda: not [p for p in cluster.processes() if "monitor" in p.cmdline()], 30, "no monitor left")
    print(f"repeated {repeated(folder)} steps, {starts} starts")


# ---- on a real Slurm ----


@real
def test_a_requeued_job_continues_its_run_and_completes_it_with_the_same_result(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", **SHORT)
    job = submit(cluster, folder, HANGPROOF_AUTH="me:secret")
    assert submit(cluster, folder) == job, "a run has one job"
    at_step(folder, 25)
    cluster.ask("scontrol", "requeue", job)
    completed(cluster, folder, job, starts=2)
    assert repeated(folder) == 0, "the warning was used to save"
    assert [e["kind"] for e in events(folder)].count("preempted") == 1
    assert log(folder, job).count("hangproof: completed") == 1
    stored = b"".join(path.read_bytes() for path in cluster.folder.glob("state/**/*") if path.is_file())
    assert b"HANGPROOF_DATA" in stored and b"me:secret" not in stored, "Slurm keeps the job's environment"
