"""Two machines' monitors on one run, with a toy of two ranks (tests/campaigns/test_nodes.py trains)."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest
from machines_helpers import AGAIN, together
from monitor_helpers import ROOT, environment, limits_file, wait_for
from run_facts import incidents, status, weight
from toys import undisturbed

STEPS = 60
LIMITS = "[watch]\nstopped_s = 1\n[end]\ngrace_s = 1\n[phases.step]\nfloor_s = 60\n"


@pytest.fixture
def run(tmp_path):
    return together(tmp_path / "toy", steps=STEPS)


@pytest.fixture
def loops(run):
    """Two machines, started. Each is the shell's loop that starts a machine's part again, in place of Slurm's job."""
    started, limits = [], str(limits_file(run, LIMITS))
    for number in (0, 1):
        env = environment(run, HANGPROOF_NODE=str(number), HANGPROOF_LIMITS=limits)
        with open(run / f"console-{number}.txt", "ab") as log:
            command = ["bash", "-c", AGAIN, sys.executable, str(run)]
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
    yield started
    for loop in started:
        if loop.poll() is None:  # the test has failed
            for process in [*psutil.Process(loop.pid).children(recursive=True), loop]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            loop.wait()


def console(folder):
    return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(folder.rglob("console-*.txt")))


def test_a_stopped_rank_is_named_by_its_machine_and_all_start_again_from_the_last_state(run, loops):
    second = run / "machines" / "1"
    (rank,) = wait_for(lambda: status(run)["step"] >= 35 and status(second)["trainer_pids"], 60, "step 35")
    os.kill(rank, signal.SIGSTOP)
    assert [loop.wait(120) for loop in loops] == [0, 0], console(run)
    now = status(run)
    assert now["state"] == "completed" and now["attempt"] > 1 and weight(run) == undisturbed(STEPS), console(run)
    (other,) = now["machines"]
    assert other["machine"] == "1" and other["host"] and other["step"] >= 35, now  # as last read: it may end later
    assert status(second)["step"] == STEPS
    found, *_ = incidents(second)
    assert (found["kind"], found["cause"], found["evidence"]["rank"]) == ("hang", "trainer_stopped", 1), found
    own, *_ = incidents(run)
    assert (own["kind"], own["evidence"]["rank"]) == ("crash", 0), "the first machine has its own side of it"
    assert own["resumed_from"] >= 30
