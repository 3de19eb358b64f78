"""`report.md`, read by somebody who has never seen this program: whole sentences, right numbers, nothing twice."""

from pathlib import Path

import pytest
from monitor_evidence import crash, frames, hang, proc, rank

from monitor import causes, report
from monitor.incident import Incident

SLEEPS = dict(ranks=[rank(0)], stacks={100: frames("loop.py:one_step")}, planned=40, quiet_s=2.3, budget_s=2.1)
LAUNCHER = (
    "Traceback (most recent call last):\n"
    '  File "/venv/bin/accelerate", line 8, in <module>\n    sys.exit(main())\n'
    "subprocess.CalledProcessError: Command '['/venv/bin/python', '-m', 'trainer']' returned non-zero exit status 1.\n"
)


def told(evidence, **values) -> str:
    """The report of an incident, without its log."""
    known = dict(
        attempt=1, progress_s=0.0, best_step=10, started_at="2026-01-02T03:04:05.678Z", detect_s=2.3, resumed_from=8,
        steps_repeated=2, recover_s=5.04, outcome="the run went on: step 11 is new",
    )  # fmt: skip
    incident = Incident(Path("incidents/0001"), evidence, causes.match(evidence), **{**known, **values})
    return report.write(incident, "toy")


def test_a_hang_is_told_with_its_place_its_time_its_limit_and_its_signs():
    text = told(hang(why=("asleep: the same stack twice within 1.2 s, and no CPU time used",), **SLEEPS))
    assert (
        "The training stood still in the middle of training, at step 10 of 40. Its last progress was at 2026-01-02 03:04:05 "
        "UTC. Here it is given 2.1 s without progress; after 2.3 s it was taken to be stuck: asleep: the same stack twice "
        "within 1.2 s, and no CPU time used. Its main thread stood in `one_step (loop.py:1)`."
    ) in text
    assert "- The run went back to its checkpoint of step 8.\n- The run went on: step 11 is new." in text
    assert (
        "Found after 2.3 s. 2 steps had to be trained again. From the last progress to the next new step it took 5.0 s."
        in text
    )
    assert "nothing spoke for or against it, so twice that was waited" in told(hang(**SLEEPS))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(outcome="failed", exit_code=1), "The training failed with an error in the middle of training, at step 10 (exit code 1)."),
        (dict(outcome="deadline", exit_code=75), "The training ended itself in the middle of training, at step 10 (exit code 75)"),
        (dict(outcome="stopped", exit_code=3), "The training saved a checkpoint and left in the middle of training, at step 10"),
        (dict(ended="ended by SIGKILL", signal=9, phase="save"), "The training ended while saving a checkpoint, at step 10: ended by SIGKILL."),
    ],
)  # fmt: skip
def test_a_crash_is_told_by_how_it_ended(values, words):
    text = told(crash(**values))
    assert words in text and "Found at once." in text


def test_an_error_is_told_once_and_a_launchers_own_traceback_not_at_all():
    log = "Traceback (most recent call last):\n  File 'x', line 1\nKeyError: 'lora_7'\n" + LAUNCHER
    text = told(
        crash(log, outcome="failed", exit_code=1, note="KeyError: 'lora_7'", ranks=[{**rank(0), "outcome": "failed"}])
    )
    before, _, details = text.partition("## Details")
    assert before.count("lora_7") == 1 and details.count("lora_7") == 1
    assert "accelerate" not in text and "CalledProcessError" not in text


def test_what_it_cost_and_what_was_lost_agree_with_what_was_done():
    assert "The run began again: there was no checkpoint yet." in told(hang(**SLEEPS), resumed_from=0)
    bad = told(hang(**SLEEPS), resumed_from=0, bad_checkpoints=["toy-step00000008-state.bad (truncated)"])
    assert "because it is bad: toy-step00000008-state.bad" in bad and "no checkpoint is left that can be used" in bad
    assert "No step was lost." in told(hang(**SLEEPS), steps_repeated=0)
    assert "1 step had to be trained again." in told(hang(**SLEEPS), steps_repeated=1)
    open_yet = told(
        hang(**SLEEPS), resumed_from=None, steps_repeated=None, recover_s=None, outcome="the run is being brought back"
    )
    assert "The run is being brought back." in open_yet and "None" not in open_yet


def test_every_rank_process_gpu_and_note_has_its_line():
    gpus = [
        {"name": "H", "utilization": 3, "memory_used": 2e9, "memory_total": 8e9, "temperature": 50, "power_w": 70.4}
    ]
    found = hang(
        ranks=[rank(0, 9), rank(1, 8, phase="save")], processes=[proc(100, "S", True, wchan="futex_wait"), proc(7, "")],
        gpu=gpus, gpu_note="the NVIDIA driver has not answered for 40 s", kernel=["NVRM: Xid (PCI:0000:01:00): 79"],
        host={"MemAvailable": 1e9, "MemTotal": 2e9, "disk_free": 3e9, "disk_total": 4e9},
    )  # fmt: skip
    text = told(found)
    for words in (
        "rank 0 (pid 100): training", "rank 1 (pid 101): saving a checkpoint", "process 100 p: asleep, waits in `futex_wait`",
        "process 7 p: gone", "GPU 0 H: 3 % busy, 2.0 of 8.0 GB, 50 °C, 70 W", "has not answered for 40 s", "Xid",
        "memory: 1.0 of 2.0 GB available", "disk: 3.0 of 4.0 GB free",
    ):  # fmt: skip
        assert words in text, words


def test_durations_numbers_and_times_read_well():
    assert [report.duration(s) for s in (3.21, 310, 7500)] == ["3.2 s", "5 min 10 s", "2 h 5 min"]
    assert [report.count(n, "process") for n in (0, 1, 2)] == ["0 processes", "1 process", "2 processes"]
    assert report.moment("2026-01-02T03:04:05.678Z") == "2026-01-02 03:04:05 UTC"
