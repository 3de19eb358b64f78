"""A toy run as a job of the test cluster: submitted, followed, disturbed, and judged at its end."""

import contextlib
import json
import re
import subprocess
import sys
from collections import Counter

import psutil
import pytest
import slurm_cluster
from monitor_helpers import ROOT, environment, wait_for
from run_facts import status, step_of, weight
from toys import undisturbed

SHORT = dict(steps=120, pace=0.05, every=20)


@pytest.fixture(scope="module")
def slurm():
    with slurm_cluster.cluster() as running:
        yield running


@pytest.fixture
def cluster(slurm):
    yield slurm
    slurm.clear()


def launch(cluster, folder, *words, code=0, **env):
    """`python -m launch slurm FOLDER …` on the cluster: its line of JSON, or standard error where it has to fail."""
    command = [sys.executable, "-m", "launch", "slurm", str(folder), "--json", *words]
    env = environment(folder) | {name: cluster.environment[name] for name in ("PATH", "SLURM_CONF")} | env
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else json.loads(done.stdout.splitlines()[-1])


def submit(cluster, folder, *words, **env):
    return launch(cluster, folder, "--partition", "main", "--gpus", "0", "--submit", *words, **env)["job"]


def log(folder, job):
    return (folder / f"slurm-{job}.log").read_text(encoding="utf-8")


def repeated(folder):
    steps = Counter(re.findall(r"^step (\d+)$", (folder / "training.log").read_text(), re.M))
    return sum(count - 1 for count in steps.values())


def at_step(folder, step):
    wait_for(lambda: step_of(folder) >= step, what=f"step {step}")


def completed(cluster, folder, job, starts, steps=SHORT["steps"], timeout_s=120.0):
    """Assert that the job and the run completed with the result of an undisturbed one, and nothing of them is left."""
    now = cluster.wait_state(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", timeout_s=timeout_s)
    text = log(folder, job)
    assert (now["JobState"], now["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert status(folder)["state"] == "completed" and weight(folder) == undisturbed(steps)
    assert int(now["Restarts"]) == starts - 1, text
    wait_for(lambda: not cluster.task("monitor"), 30, "no monitor left")
    print(f"repeated {repeated(folder)} steps, {starts} starts")


def kill_step(cluster, job, at_least=3):
    """SIGKILL the monitor, its keeper and the training, as a node out of memory may; their process numbers."""
    killed = []
    for process in cluster.task(SLURM_JOB_ID=job, SLURM_STEP_ID="0"):
        with contextlib.suppress(psutil.Error):
            process.kill()
            killed.append(process.pid)
    assert len(killed) >= at_least or at_least < 3, killed
    return killed


def drain(cluster, job, node):
    cluster.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    cluster.ask("scontrol", "requeue", job)


def down(cluster, job, node):
    cluster.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
