"""What ends a run, or what the system refuses, costs no steps: real runs of the toy loop under the real monitor."""

import os
import secrets
import threading

import pytest
import run_facts
from monitor_helpers import wait_for

from benchmarks import goodput, toy_loop
from benchmarks.trial import begin, finish, ours, read_lines, toy_environment
from guards import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")]

STEPS = 60
ONE_FAILURE = "[restart]\nwithout_progress_count = 1\nbackoff_first_s = 0.5\n"


class Toy:
    """A run of `STEPS` steps, whose only checkpoints on the disk are those that something other than its schedule makes."""

    def __init__(self, work, faults):
        self.job = ours(work, STEPS, 10_000, limits=ONE_FAILURE)
        self.folder, self.token = self.job.folder, secrets.token_hex(8)
        self.ledger = work / "ledger.jsonl"
        self.environment = toy_environment(work, faults)

    def start(self, **more):
        self.process = begin(self.job, self.environment | more, self.token)

    def end(self):
        """The status after the end of the monitor."""
        self.process.wait(120)
        return run_facts.status(self.folder)

    def states(self):
        return {checkpoint.guard_of(path)["step"]: path for path in checkpoint.states(self.folder)}

    def steps(self):
        return [line["step"] for line in read_lines(self.ledger) if line["what"] == "step"]


@pytest.fixture
def toy(tmp_path):
    made = []
    yield lambda faults="": made.append(Toy(tmp_path, faults)) or made[-1]
    for one in made:
        finish(one.process, one.token)


def weights(step):
    content = b""
    for number in range(1, step + 1):
        content = toy_loop.advance(content, number)
    return content


def test_a_run_that_gives_up_has_its_newest_steps_on_the_disk(toy):
    run = toy("raises@40")
    run.start()
    status = run.end()
    assert status["state"] == "failed"
    (step, state), *more = run.states().items()
    assert not more and 30 < step <= 40  # the one that was written last, when the fault came
    assert checkpoint.problems(state) == [] and (state / "weights.bin").read_bytes() == weights(step)
    assert f"{state.name} is kept" in (run.folder / "incidents" / "0001" / "report.md").read_text()
    run.start()  # the fault occurs once: the run goes on from there
    assert run.end()["state"] == "completed"
    assert run.steps() == [*range(1, 41), *range(step + 1, STEPS + 1)]
    assert (run.folder / "toy.safetensors").read_bytes() == toy_loop.expected(STEPS)


def test_a_stop_at_once_has_the_newest_steps_on_the_disk(toy):
    run = toy()
    run.start()
    wait_for(lambda: len(run.steps()) >= 20)
    (run.folder / "stop.request").write_text('{"now": true}', encoding="utf-8")
    status = run.end()
    assert status["state"] == "stopped"
    step, state = max(run.states().items())
    assert step >= len(run.steps()) - 10 and (state / "weights.bin").read_bytes() == weights(step)
    assert state.name in status["reason"]


def test_steps_that_the_disk_refuses_stay_in_memory_and_the_next_start_goes_on_from_them(toy, tmp_path):
    """The interpreter that writes them fails: as on a full disk, nothing is written and nothing is freed."""
    run = toy("raises@40")
    broken = tmp_path / "broken"
    (broken / "guards").mkdir(parents=True)
    shim = "import sys\nif 'guards.snapshot_keep' in sys.orig_argv:\n    sys.exit('No space left on device')\n"
    (broken / "sitecustomize.py").write_text(shim, encoding="utf-8")
    run.start(PYTHONPATH=str(broken))
    status = run.end()
    assert status["state"] == "failed" and "stay in memory" in status["reason"] and run.states() == {}
    run.start()
    assert run.end()["state"] == "completed"
    assert run.steps().count(30) == 1  # no step before the fault is trained twice


def test_a_start_that_the_system_refused_once_is_made(toy):
    run = toy()
    log = run.folder / "training.log"
    log.mkdir()
    threading.Timer(1.5, log.rmdir).start()
    run.start()
    assert run.end()["state"] == "completed"


def test_a_run_under_real_supervision_repeats_at_most_one_step_for_each_failure():
    """tests/campaigns/test_faults.py tears a record: the disk's checkpoint, or the start, is used instead."""
    done = goodput.one_run(goodput.CONTENDERS["ours"], 40, ("sigkill@13", "raises@27"), 120.0, torch=False)
    assert done["finished"] and done["right"] and done["faults"] == 2 and done["repeated"] <= 2
