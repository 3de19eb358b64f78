"""A real Slurm takes the job away in every way it can; the run completes with the result of an undisturbed one.

python -m pytest tests/campaigns/test_slurm.py          25 minutes; HANGPROOF_SEED repeats the random disturbances
"""

import random
import time

import psutil
import pytest
from machines_helpers import together
from monitor_helpers import events, limits_file, stop, toy_run, wait_for
from run_facts import incidents, status, step_of, trainers
from seeds import seed
from slurm_helpers import SHORT, at_step, completed, down, drain, kill_step, log, missing, repeated, submit
from toys import fault_at

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


def urgent(cluster, job, node):
    words = ("--parsable", "--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null")
    cluster.ask("sbatch", *words, "--wrap", "sleep 3")


@pytest.mark.parametrize("take", [drain, down, urgent])
def test_a_run_whose_node_is_taken_is_saved_and_completes(take, cluster, tmp_path):
    """The node is drained, it is down, or a job of higher priority gets it."""
    folder = toy_run(tmp_path / "toy", **SHORT)
    job = submit(cluster, folder)
    at_step(folder, 30)
    node = cluster.job(job)["BatchHost"]
    take(cluster, job, node)
    try:
        completed(cluster, folder, job, starts=2)
    finally:
        if cluster.states()[node] != "idle":
            cluster.ask("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    assert repeated(folder) == 0
    assert take is urgent or cluster.job(job)["BatchHost"] != node


@pytest.mark.parametrize(("what", "code"), [("stopped by its user", "3:0"), ("fails again and again", "4:0")])
def test_a_run_that_ended_is_not_requeued(what, code, cluster, tmp_path):
    always = fault_at(30, "raise RuntimeError('always')", "True") if code == "4:0" else ""
    folder = toy_run(tmp_path / "toy", always, **SHORT)
    job = submit(cluster, folder)
    if not always:
        at_step(folder, 30)
        stop(folder)
    now = cluster.wait_state(job, "FAILED", "COMPLETED")
    assert (now["JobState"], now["ExitCode"], now["Restarts"]) == ("FAILED", code, "0")
    assert not always or "not requeued" in log(folder, job)


def test_a_node_that_slurm_gave_up_trains_on_and_the_next_start_waits_for_it(cluster, tmp_path):
    """Its slurmd is stopped, so nothing tells the monitor there to end: the job on the other node must not write."""
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
    begun = [event["step"] for event in events(folder, "started")]
    assert begun == [0, 300], "the second start had nothing left to train"


def test_a_controller_that_restarts_loses_no_run(cluster, tmp_path):
    """Slurm's controller is gone when the monitor has saved and the job wants to be requeued."""
    folder = toy_run(tmp_path / "toy", **SHORT)
    job = submit(cluster, folder)
    at_step(folder, 30)
    keeper = psutil.Process(status(folder)["keeper_pid"])
    cluster.controller.terminate()  # jobs run on
    cluster.controller.wait(30)
    keeper.terminate()
    wait_for(lambda: "trying again" in log(folder, job), 60)
    cluster.start_controller()
    completed(cluster, folder, job, starts=2)
    assert repeated(folder) == 0


@pytest.mark.parametrize("number", [seed(), seed() + 1])
def test_a_run_survives_eight_disturbances_at_random_moments(number, cluster, tmp_path):
    """A requeue or a kill -9 of the step at any moment of a start; or a warning while it trains."""
    moments = random.Random(number)
    steps = 1200  # more than eight starts of up to 8 s can train
    folder = toy_run(tmp_path / "toy", steps=steps, pace=0.05, every=20)
    job, kills = submit(cluster, folder), 0
    for start in range(8):
        wait_for(lambda start=start: cluster.job(job).get("Restarts") == str(start), 120, f"start {start + 1}")
        cluster.wait_state(job, "RUNNING")
        what = moments.choice(("requeue", "kill", "warning"))
        if what == "warning":
            before = len(events(folder, "phase"))
            wait_for(lambda before=before: [e for e in events(folder, "phase")[before:] if e["phase"] == "step"], 60)
        time.sleep(moments.uniform(0, 8))
        if what == "kill":
            kills += 1
            wait_for(lambda: kill_step(cluster, job), 60, "a step to kill")
        elif what == "requeue":
            cluster.ask("scontrol", "requeue", job)
        else:  # what Slurm sends some time before it ends the job
            cluster.ask("scancel", "--signal=TERM", "--batch", job)
        print(f"{start + 1}: {what} at step {step_of(folder) if (folder / 'status.json').exists() else 0}")
    completed(cluster, folder, job, starts=9, steps=steps, timeout_s=300)
    assert repeated(folder) <= 20 * kills


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


def test_a_stopped_rank_on_the_second_node_is_named_and_the_step_starts_again_on_the_jobs_nodes(cluster, tmp_path):
    folder = together(tmp_path / "toy", steps=80, pace=0.1, every=20)
    limits = limits_file(folder, "[watch]\nstopped_s = 1\n[phases.step]\nfloor_s = 60\n")
    job = submit(cluster, folder, "--nodes", "2", HANGPROOF_LIMITS=str(limits))
    at_step(folder, 25)
    (rank,) = cluster.task("toy.py", SLURM_PROCID="1")
    rank.suspend()
    completed(cluster, folder, job, starts=1, steps=80)
    assert repeated(folder) <= 20 and "starting all of them again" in log(folder, job)
    found, *_ = incidents(folder / "machines" / "1")
    assert (found["cause"], found["evidence"]["rank"]) == ("trainer_stopped", 1), found
