"""`python -m launch slurm`: the script as text, and on a real Slurm that takes the job away in every way it can.

The run is the toy of monitor_helpers, whose result depends on every step; one is the built-in trainer on its tiny model.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest
import slurm_cluster
from monitor_helpers import (
    ROOT,
    environment,
    events,
    fault_at,
    status,
    step_of,
    stop,
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


def kill_step(cluster, job):
    """SIGKILL the monitor, its keeper and the training, as the kernel does when a node runs out of memory."""
    killed = []
    for process in cluster.processes():
        with contextlib.suppress(psutil.Error):
            env = process.environ()
            if (
                env.get("SLURM_JOB_ID") == job
                and env.get("SLURM_STEP_ID") == "0"
                and "slurmstepd" not in process.name()
            ):
                process.kill()
                killed.append(process.pid)
    assert len(killed) >= 3, killed


def drain(cluster, job, node):
    cluster.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    cluster.ask("scontrol", "requeue", job)


def down(cluster, job, node):
    cluster.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")


TAKEN = {  # what happens to the job at step 30: (how, starts, whether there is time to save)
    "a kill -9 of its step": (lambda cluster, job, node: kill_step(cluster, job), 2, False),
    "a drained node": (drain, 2, True),
    "a node that is down": (down, 2, True),
    "a warning of the time limit": (
        lambda cluster, job, node: cluster.ask("scancel", "--signal=TERM", "--batch", job),
        2,
        True,
    ),
    "a job of higher priority": (
        lambda cluster, job, node: cluster.ask(
            *("sbatch", "--parsable", "--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null"),
            *("--wrap", "sleep 3"),
        ),
        2,
        True,
    ),
}


@real
@pytest.mark.long
@pytest.mark.parametrize("what", TAKEN)
def test_a_run_survives(what, cluster, tmp_path):
    take, starts, saves = TAKEN[what]
    folder = toy_run(tmp_path / "toy", **SHORT)
    job = submit(cluster, folder)
    at_step(folder, 30)
    node = cluster.job(job)["BatchHost"]
    take(cluster, job, node)
    try:
        completed(cluster, folder, job, starts)
    finally:
        if cluster.states()[node] != "idle":
            cluster.ask("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    assert repeated(folder) <= (0 if saves else SHORT["every"])
    if what in ("a drained node", "a node that is down"):
        assert cluster.job(job)["BatchHost"] != node


@real
@pytest.mark.long
def test_a_drained_node_that_returns_continues_the_job(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", **SHORT)
    job = submit(cluster, folder, "--time", "1:00:00")
    at_step(folder, 30)
    for node in ("n1", "n2"):
        cluster.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    cluster.ask("scontrol", "requeue", job)
    cluster.wait_state(job, "PENDING")
    time.sleep(10)
    assert cluster.job(job)["JobState"] == "PENDING"
    for node in ("n1", "n2"):
        cluster.ask("scontrol", "update", f"nodename={node}", "state=resume")
    completed(cluster, folder, job, starts=2)
    assert repeated(folder) == 0


@real
@pytest.mark.long
def test_the_time_limit_of_a_job_is_no_end_of_its_run(cluster, tmp_path):
    """Slurm checks limits once a minute: a limit of 3 minutes with 120 s of notice is 60 to 120 s of training."""
    folder = toy_run(tmp_path / "toy", steps=400, pace=0.4, every=100)
    job = submit(cluster, folder, "--time", "3")
    completed(cluster, folder, job, starts=2, steps=400)
    assert repeated(folder) == 0


@real
@pytest.mark.long
def test_a_cancelled_job_is_not_requeued_and_its_run_can_be_submitted_again(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", **SHORT)
    job = submit(cluster, folder)
    at_step(folder, 30)
    cluster.ask("scancel", job)
    cluster.wait_state(job, "CANCELLED")
    wait_for(lambda: status(folder)["state"] == "preempted", what="the run was saved")
    time.sleep(10)
    assert cluster.job(job)["JobState"] == "CANCELLED"
    second = submit(cluster, folder)
    assert second != job
    completed(cluster, folder, second, starts=1)
    assert repeated(folder) == 0


@real
@pytest.mark.long
def test_a_run_that_cannot_be_saved_is_not_requeued(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", fault_at(30, "raise RuntimeError('always')", "True"), **SHORT)
    job = submit(cluster, folder)
    now = cluster.wait_state(job, "FAILED", "COMPLETED")
    assert (now["JobState"], now["ExitCode"], now["Restarts"]) == ("FAILED", "4:0", "0")
    assert "not requeued" in log(folder, job)


@real
@pytest.mark.long
def test_a_run_that_its_user_stops_is_not_requeued(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", **SHORT)
    job = submit(cluster, folder)
    at_step(folder, 30)
    stop(folder)
    now = cluster.wait_state(job, "FAILED", "COMPLETED")
    assert (now["JobState"], now["ExitCode"], now["Restarts"]) == ("FAILED", "3:0", "0")


@real
def test_what_slurm_refuses_is_explained(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", **SHORT)
    text = launch(cluster, folder, "--submit", code=1)
    assert "the default partition has no GPU; choose one with --partition: gpu" in text
    text = launch(cluster, folder, "--submit", "--partition", "nowhere", code=1)
    assert "nowhere" in text and "Traceback" not in text, text
    text = launch(cluster, folder, "--submit", "--partition", "main", "--cpus", "99", code=1)
    assert "never start" in text and "PartitionConfig" in text and "fewer --cpus" in text
    text = launch(cluster, folder, "--submit", "--partition", "gpu", "--gpus-type", "h100", code=1)
    assert "Requested node configuration is not available; no node has what the script asks for" in text
    text = launch(cluster, folder, "--submit", "--partition", "main", "--time", "tomorrow", code=1)
    assert "--time tomorrow" in text
    assert not cluster.ask("squeue", "--noheader", "--name=hangproof-toy")


@real
def test_a_job_on_a_node_with_gpus_gets_its_gpu(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", steps=5, pace=0.02, every=5)
    (folder / "train.sh").write_text(
        'echo "gpus $SLURM_JOB_GPUS, devices $CUDA_VISIBLE_DEVICES"\n' + (folder / "train.sh").read_text()
    )
    answer = launch(cluster, folder, "--submit", "--partition", "gpu")
    assert (answer["gpus"], answer["kind"]) == (1, "")
    completed(cluster, folder, answer["job"], starts=1, steps=5)
    assert "gpus 0, devices 0" in (folder / "training.log").read_text()
