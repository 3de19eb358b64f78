"""`python -m launch slurm` on a real Slurm that takes the job away in every way it can.

The run is the toy of monitor_helpers, whose result depends on every step; one is the built-in trainer on its tiny model.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter

import nodes_helpers
import psutil
import pytest
import slurm_cluster
from monitor_helpers import (
    ROOT,
    environment,
    events,
    fault_at,
    limits_file,
    status,
    step_of,
    stop,
    toy_run,
    trainers,
    undisturbed,
    wait_for,
    weight,
)

from benchmarks import machines

SHORT = dict(steps=120, pace=0.05, every=20)
pytestmark = pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-")


@pytest.fixture(scope="module")
def started():
    with slurm_cluster.cluster() as running:
        yield running


@pytest.fixture
def cluster(started):
    """The cluster without jobs."""
    yield started
    started.clear()


def launch(cluster, folder, *words, code=0, **env):
    """`python -m launch slurm FOLDER …` on the cluster: its line of JSON, or its standard error where it has to fail."""
    command = [sys.executable, "-m", "launch", "slurm", str(folder), "--json", *words]
    more = {name: cluster.environment[name] for name in ("PATH", "SLURM_CONF")}
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


def completed(cluster, folder, job, starts, steps=SHORT["steps"], timeout_s=120.0):
    """Assert that the job and the run completed with the result of an undisturbed one, and nothing of them is left."""
    now = cluster.wait_state(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", timeout_s=timeout_s)
    text = log(folder, job)
    assert (now["JobState"], now["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert status(folder)["state"] == "completed" and weight(folder) == undisturbed(steps)
    assert int(now["Restarts"]) == starts - 1, text
    wait_for(lambda: not cluster.processes_of("monitor"), 30, "no monitor left")
    print(f"repeated {repeated(folder)} steps, {starts} starts")


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


def kill_step(cluster, job, at_least=3):
    """SIGKILL the monitor, its keeper and the training, as a node that runs out of memory may; their process numbers."""
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
    assert len(killed) >= at_least or at_least < 3, killed
    return killed


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


@pytest.mark.long
def test_the_time_limit_of_a_job_is_no_end_of_its_run(cluster, tmp_path):
    """Slurm checks limits once a minute: a limit of 3 minutes with 120 s of notice is 60 to 120 s of training."""
    folder = toy_run(tmp_path / "toy", steps=200, pace=0.4, every=100)
    job = submit(cluster, folder, "--time", "3")
    completed(cluster, folder, job, starts=2, steps=200, timeout_s=400)
    assert repeated(folder) == 0


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


@pytest.mark.long
def test_a_run_that_cannot_be_saved_is_not_requeued(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", fault_at(30, "raise RuntimeError('always')", "True"), **SHORT)
    job = submit(cluster, folder)
    now = cluster.wait_state(job, "FAILED", "COMPLETED")
    assert (now["JobState"], now["ExitCode"], now["Restarts"]) == ("FAILED", "4:0", "0")
    assert "not requeued" in log(folder, job)


@pytest.mark.long
def test_a_run_that_its_user_stops_is_not_requeued(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", **SHORT)
    job = submit(cluster, folder)
    at_step(folder, 30)
    stop(folder)
    now = cluster.wait_state(job, "FAILED", "COMPLETED")
    assert (now["JobState"], now["ExitCode"], now["Restarts"]) == ("FAILED", "3:0", "0")


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


def test_a_job_on_a_node_with_gpus_gets_its_gpu(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", steps=5, pace=0.02, every=5)
    (folder / "train.sh").write_text(
        'echo "gpus $SLURM_JOB_GPUS, devices $CUDA_VISIBLE_DEVICES"\n' + (folder / "train.sh").read_text()
    )
    answer = launch(cluster, folder, "--submit", "--partition", "gpu")
    assert (answer["gpus"], answer["kind"]) == (1, "")
    completed(cluster, folder, answer["job"], starts=1, steps=5)
    assert "gpus 0, devices 0" in (folder / "training.log").read_text()


@pytest.mark.long
def test_the_built_in_trainer_ends_with_the_undisturbed_lora(cluster, tmp_path):
    """A requeue in mid-run, and a kill -9 of the step in the second start."""
    training = machines.tiny(30, 5)
    root = tmp_path / "data"
    env = training.environment(root)
    folder = training.create(root, {})
    env = {name: value for name, value in env.items() if os.environ.get(name) != value}
    job = submit(cluster, folder, **env)
    at_step(folder, 8)
    cluster.ask("scontrol", "requeue", job)
    at_step(folder, 18)
    kill_step(cluster, job)
    now = cluster.wait_state(job, "COMPLETED", "FAILED", "CANCELLED", timeout_s=300)
    assert (now["JobState"], now["Restarts"]) == ("COMPLETED", "2"), log(folder, job)
    made = hashlib.sha256((folder / f"{folder.name}.safetensors").read_bytes()).hexdigest()
    assert made == training.expected()
    steps = Counter(training.trained(root))
    assert sorted(steps) == list(range(1, 31)) and sum(count - 1 for count in steps.values()) <= 5, steps
    print(f"{sum(count - 1 for count in steps.values())} steps repeated, 3 starts")


@pytest.mark.long
@pytest.mark.parametrize(
    "what", ["nothing", "a requeue", "a warning of the time limit", "a kill -9 of the task on the second node"]
)
def test_two_nodes_train_one_run(what, cluster, tmp_path):
    """One task on each node: the monitor, and a node of it; a secret of the job that no command line shows."""
    folder = tmp_path / "toy"
    folder.mkdir()
    toy = nodes_helpers.TOY.format(root=str(ROOT), nodes=2, steps=80, pace=0.1, every=20, faults="")
    (folder / "toy.py").write_text(toy, encoding="utf-8")
    (folder / "train.sh").write_text(f"cd {folder}\nexec {sys.executable} toy.py\n", encoding="utf-8")
    limits = limits_file(folder, nodes_helpers.LIMITS.replace("return_s = 60", "return_s = 20"))
    job = submit(cluster, folder, HANGPROOF_NODES="2", HANGPROOF_LIMITS=str(limits))
    at_step(folder, 25)
    assert cluster.job(job)["NumNodes"] == "2"
    monitors = cluster.processes_of("monitor")
    (token,) = {process.environ()["HANGPROOF_NODE_TOKEN"] for process in monitors}
    assert len(token) == 64 and token not in str([p.cmdline() for p in cluster.processes()])
    assert token not in "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    if what == "a requeue":
        cluster.ask("scontrol", "requeue", job)
    elif what == "a warning of the time limit":
        cluster.ask("scancel", "--signal=TERM", "--batch", job)
    elif what != "nothing":
        for process in cluster.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_PROCID") == "1" and "slurmstepd" not in process.name():
                    process.kill()
    completed(cluster, folder, job, starts=1 if what == "nothing" else 2, steps=80)
    assert repeated(folder) <= (20 if "kill" in what else 0)


def test_a_run_whose_path_needs_quotes(cluster, tmp_path):
    folder = toy_run(tmp_path / 'it\'s a "run" for $5 #1; ünï', steps=5, pace=0.02, every=5)
    (folder / "train.sh").write_text(f'cd "$HANGPROOF_RUN"\nexec {sys.executable} toy.py\n', encoding="utf-8")
    completed(cluster, folder, submit(cluster, folder), starts=1, steps=5)


@pytest.mark.long
def test_a_node_that_slurm_gave_up_trains_on_and_the_next_start_waits_for_it(cluster, tmp_path):
    """Its slurmd is stopped, so nothing tells the monitor there to end: the job runs on the other node and must not write."""
    folder = toy_run(tmp_path / "toy", steps=300, pace=0.1, every=20)
    job = submit(cluster, folder)
    at_step(folder, 30)
    node = cluster.job(job)["BatchHost"]
    lost = [p for p in cluster.processes() if p.cmdline()[:1] == ["slurmd"] and node in p.cmdline()]
    assert len(lost) == 1
    lost[0].suspend()
    try:
        down(cluster, job, node)
        wait_for(lambda: cluster.job(job).get("BatchHost", node) != node, 60)
        step = step_of(folder)
        time.sleep(5)
        assert step < step_of(folder) < 300, "the first node trains on"
        assert trainers(folder) and len(trainers(folder)) == 1
        completed(cluster, folder, job, starts=2, steps=300)
    finally:
        lost[0].resume()
    assert repeated(folder) == 0
    assert [event["step"] for event in events(folder, "started")] == [0, 300], (
        "the second start had nothing left to train"
    )


@pytest.mark.long
def test_a_run_whose_checkpoints_are_gone_from_the_disk_continues_from_its_store(cluster, tmp_path):
    training = machines.toy(60, 20)
    root = tmp_path / "data"
    env = training.environment(root)
    folder = training.create(root, {"store": str(tmp_path / "store")})
    env = {name: value for name, value in env.items() if os.environ.get(name) != value}
    limits = tmp_path / "limits.toml"
    limits.write_text("[store]\n" + "".join(f"{key} = {value}\n" for key, value in machines.LIMITS.items()))
    job = submit(cluster, folder, **env | {"HANGPROOF_LIMITS": str(limits)})
    at_step(folder, 30)
    cluster.ask("scancel", job)
    cluster.wait_state(job, "CANCELLED")
    wait_for(lambda: status(folder)["state"] == "preempted", what="the run was saved")
    saved = status(folder)["step"]
    wait_for(lambda: not cluster.processes_of("monitor"), what="the store has it")
    for state in folder.glob("*-state"):
        shutil.rmtree(state)
    (folder / "monitor.json").unlink()
    second = submit(cluster, folder, **env | {"HANGPROOF_LIMITS": str(limits)})
    now = cluster.wait_state(second, "COMPLETED", "FAILED", timeout_s=180)
    assert now["JobState"] == "COMPLETED", log(folder, second)
    made = hashlib.sha256((folder / f"{folder.name}.safetensors").read_bytes()).hexdigest()
    assert made == training.expected()
    steps = training.trained(root)
    assert sorted(set(steps)) == list(range(1, 61)) and len(steps) - 60 <= 20, (saved, steps)
    print(f"saved at step {saved}, {len(steps) - 60} steps repeated")


@pytest.mark.long
def test_two_nodes_of_the_built_in_trainer_end_with_the_lora_of_two_nodes_that_nothing_disturbed(cluster, tmp_path):
    """accelerate's group over two nodes, on processors: the job is requeued in mid-run."""
    training, made = machines.tiny(12, 4), {}
    for name in ("calm", "requeued"):
        root = tmp_path / name
        env = training.environment(root)
        folder = training.create(root, {"nodes": 2})
        job = submit(cluster, folder, **{key: value for key, value in env.items() if os.environ.get(key) != value})
        if name == "requeued":
            at_step(folder, 6)
            cluster.ask("scontrol", "requeue", job)
        now = cluster.wait_state(job, "COMPLETED", "FAILED", "CANCELLED", timeout_s=600)
        starts = 1 if name == "calm" else 2
        assert (now["JobState"], now["Restarts"]) == ("COMPLETED", str(starts - 1)), log(folder, job)
        assert now["NumNodes"] == "2"
        made[name] = (folder / f"{folder.name}.safetensors").read_bytes()
        steps = Counter(training.trained(root))
        assert sorted(steps) == list(range(1, 13)) and sum(steps.values()) - 12 <= 4, steps
        print(f"{name}: {sum(steps.values()) - 12} steps repeated, {starts} starts")
    assert made["calm"] == made["requeued"]


@pytest.mark.long
def test_a_controller_that_restarts_loses_no_run(cluster, tmp_path):
    """Slurm's controller is gone when the monitor has saved and the job wants to be requeued."""
    folder = toy_run(tmp_path / "toy", **SHORT)
    job = submit(cluster, folder)
    at_step(folder, 30)
    keeper = psutil.Process(status(folder)["keeper_pid"])
    cluster.stop_controller()
    keeper.terminate()
    wait_for(lambda: "trying again" in log(folder, job), 60)
    cluster.start_controller()
    completed(cluster, folder, job, starts=2)
    assert repeated(folder) == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_run_survives_eight_disturbances_at_random_moments(seed, cluster, tmp_path):
    """A requeue or a kill -9 of the step at any moment of a start, its first second included; or a warning while it trains."""
    moments = random.Random(seed)
    steps = 1200  # more than eight starts of up to 8 s can train
    folder = toy_run(tmp_path / "toy", steps=steps, pace=0.05, every=20)
    job, kills = submit(cluster, folder), 0
    for number in range(8):
        wait_for(lambda number=number: cluster.job(job).get("Restarts") == str(number), 120, f"start {number + 1}")
        cluster.wait_state(job, "RUNNING")
        what = moments.choice(("requeue", "kill", "warning"))
        if what == "warning":
            before = len(events(folder, "phase"))
            wait_for(lambda before=before: [e for e in events(folder, "phase")[before:] if e["phase"] == "step"], 60)
        time.sleep(moments.uniform(0, 8))
        if what == "kill":
            kills += 1
            wait_for(lambda: kill_step(cluster, job, at_least=1), 60, "a step to kill")
        else:
            words = ("scontrol", "requeue") if what == "requeue" else ("scancel", "--signal=TERM", "--batch")
            cluster.ask(*words, job)
        print(f"{number + 1}: {what} at step {step_of(folder) if (folder / 'status.json').exists() else 0}")
    completed(cluster, folder, job, starts=9, steps=steps, timeout_s=300)
    assert repeated(folder) <= 20 * kills
